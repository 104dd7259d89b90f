"""The model's configuration, checked and resolved: one frozen dataclass with Hugging Face's names.

`ModelConfig.from_hf` takes `glm_moe_dsa` (GLM-5.x) and `deepseek_v32` (DeepSeek-V3.2), and raises
one ValueError that lists everything wrong with the config. A ModelConfig that exists is sound: no
layer checks it again. How a `config.json` is read stands in `hf_config.py`.

No jax here: a config is read before a backend exists.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from os import PathLike
from typing import Any

from dcp_jax import hf_config, quantization

_CHECKPOINT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `"default"`, or `"yarn"` with its parameters.

    cos and sin are multiplied by `attention_factor`, which is g(mscale) / g(mscale_all_dim).
    """

    rope_type: str
    rope_theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def yarn_mscale(self, mscale: float) -> float:
        """g(mscale) = 0.1 mscale ln(factor) + 1, or 1 without YaRN."""
        if self.rope_type != "yarn" or self.factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: exactly 1 for every released model."""
        return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of one model.

    `indexer_types[l]` is "full" (the layer has its own indexer) or "shared" (it uses the previous
    full layer's selection); `mlp_layer_types[l]` is "dense" or "sparse". `latent_norm_eps` is the
    epsilon of q_a_layernorm and kv_a_layernorm, which Hugging Face fixes at 1e-6 whatever
    `rms_norm_eps` is. `dtype` is the checkpoint's, not the computation's. The MTP layer has the
    number `num_hidden_layers`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    indexer_rope_interleave: bool
    intermediate_size: int
    moe_intermediate_size: int
    mlp_layer_types: tuple[str, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    latent_norm_eps: float = 1e-6
    num_nextn_predict_layers: int = 0
    index_share_for_mtp_iteration: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "float32"
    quantization: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        optional = {f.name for f in fields(self) if f.default is None}
        given = {k: v for k, v in vars(self).items() if v is not None or k not in optional}
        problems: list[str] = []
        for name, value in hf_config.read(given, problems).items():
            object.__setattr__(self, name, value)
        # what counts with the sizes comes after they are known to be sizes
        _refuse(problems or list(_problems(self)))

    @classmethod
    def from_hf(cls, source: str | PathLike[str] | Mapping[str, Any]) -> "ModelConfig":
        """Read a checkpoint directory's `config.json`, or the dict that it holds."""
        values, problems = hf_config.resolve(source)
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
        if missing:
            problems.append(f"required fields are missing or null: {', '.join(missing)}")
        _refuse(problems)
        values["rope"] = RopeConfig(**values["rope"])
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: the channels without RoPE, then those with it."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention scores (the indexer's scores have no YaRN term)."""
        return self.qk_head_dim**-0.5 * self.rope.yarn_mscale(self.rope.mscale_all_dim) ** 2

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers with an indexer of their own, without the MTP layer, which has one too."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    def index_ordinal(self, layer: int) -> int:
        """Which index K cache layer `layer` selects by, counted from 0.

        A shared layer selects by the last full layer's before it; the MTP layer has its own, after
        all others.
        """
        if layer == self.num_hidden_layers:
            return len(self.full_layers)
        return self.indexer_types[: layer + 1].count("full") - 1

    def is_full(self, layer: int) -> bool:
        """Whether the layer has an indexer of its own; the MTP layer always has."""
        return layer == self.num_hidden_layers or self.indexer_types[layer] == "full"

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's feed-forward part is a mixture of experts; the MTP layer's is."""
        return layer == self.num_hidden_layers or self.mlp_layer_types[layer] == "sparse"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError(f"this model config cannot be used: {'; '.join(problems)}.")


def _problems(c: ModelConfig) -> Iterator[str]:
    """Everything that makes a config unusable, one clause each."""
    yield from _layer_problems(c)
    yield from _router_problems(c)
    if c.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim={c.qk_rope_head_dim} is odd, but RoPE turns pairs: make it even"
    if c.index_head_dim < c.qk_rope_head_dim:
        yield (
            f"index_head_dim={c.index_head_dim} is less than qk_rope_head_dim="
            f"{c.qk_rope_head_dim}, the channels of an index head that RoPE turns: make it larger"
        )
    if c.num_nextn_predict_layers not in (0, 1):
        yield (
            f"num_nextn_predict_layers={c.num_nextn_predict_layers!r}, but one MTP layer, run "
            "repeatedly, is all that is implemented: use 0 or 1"
        )
    ids = [("bos_token_id", c.bos_token_id), ("pad_token_id", c.pad_token_id)]
    for name, token in ids + [("eos_token_id", token) for token in c.eos_token_ids]:
        if token is not None and token >= c.vocab_size:
            yield (
                f"{name}={token!r} is outside the vocabulary of vocab_size={c.vocab_size!r}: "
                "correct one of the two"
            )
    if c.rope.beta_fast < c.rope.beta_slow:
        yield (
            f"beta_fast={c.rope.beta_fast!r} is less than beta_slow={c.rope.beta_slow!r}, but YaRN "
            "counts rotations down from the first to the second: exchange them"
        )
    if c.dtype not in _CHECKPOINT_DTYPES:
        yield f"dtype={c.dtype!r} is no dtype of a released checkpoint: use " + " or ".join(
            _CHECKPOINT_DTYPES
        )
    if c.quantization is not None:
        yield from quantization.problems(c.quantization)


def _layer_problems(c: ModelConfig) -> Iterator[str]:
    for name, kinds in (
        ("indexer_types", ("full", "shared")),
        ("mlp_layer_types", ("dense", "sparse")),
    ):
        types = getattr(c, name)
        if len(types) != c.num_hidden_layers:
            yield (
                f"{name} names {len(types)} layers, but num_hidden_layers={c.num_hidden_layers}: "
                "name each layer once"
            )
        unknown = sorted(set(types) - set(kinds))
        if unknown:
            yield f"{name} has {', '.join(map(repr, unknown))}: use {' or '.join(map(repr, kinds))}"
    if c.indexer_types[:1] == ("shared",):
        yield (
            "layer 0 shares its indexer, but there is no layer before it whose selection it could "
            "use: make layer 0 'full'"
        )


def _router_problems(c: ModelConfig) -> Iterator[str]:
    if c.n_routed_experts % c.n_group:
        yield (
            f"n_group={c.n_group} does not divide n_routed_experts={c.n_routed_experts}: groups "
            "are of equal size, so use a divisor"
        )
        return
    per_group = c.n_routed_experts // c.n_group
    if c.n_group > 1 and per_group < 2:
        yield (
            f"n_group={c.n_group} leaves {per_group} expert in a group, but a group is judged by "
            "its best two: use fewer groups"
        )
    if c.topk_group > c.n_group:
        yield f"topk_group={c.topk_group} exceeds n_group={c.n_group}: use at most n_group"
    allowed = min(c.topk_group, c.n_group) * per_group
    if c.num_experts_per_tok > allowed:
        yield (
            f"num_experts_per_tok={c.num_experts_per_tok} exceeds the {allowed} experts of "
            f"topk_group={c.topk_group} groups: use fewer experts or more groups"
        )
