"""The tensors of released checkpoints, written down from the models' description: no mapping used.

One line per kind of tensor: a name with ranges (`{0-77}`), its dtype and shape, and how many
tensors that is. `tests/weights/inventories` holds the lines of three releases; the loader's own
table (`weights/mapping.py`) is tested against them, and `write_checkpoint` writes what they list.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcp_jax.config import ModelConfig
from dcp_jax.quantization import Blocks, block_format, kept_modules

# dtypes of what is not quantised: (norms and their like, everything else).
FLOATS = {"deepseek_v32": ("F32", "BF16"), "glm_moe_dsa": ("BF16", "BF16")}
_MATRICES = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk"),
    *("gate_proj", "up_proj", "down_proj"),
)


@dataclass(frozen=True)
class Line:
    """Tensors whose names differ in numbers only.

    Attributes:
        pattern: a name with `{a-b}` for each number from a to b, or `{a,b,...}`.
        dtype: as safetensors spells it.
        shape: of each.
    """

    pattern: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many tensors."""
        return math.prod(len(numbers) for numbers in _ranges(self.pattern))

    @property
    def names(self) -> Iterator[str]:
        """Their names."""
        parts = re.split(r"{.*?}", self.pattern)
        for numbers in itertools.product(*_ranges(self.pattern)):
            yield "".join(
                map("".join, itertools.zip_longest(parts, map(str, numbers), fillvalue=""))
            )

    def __str__(self) -> str:
        """`pattern dtype [shape] xcount`."""
        shape = ",".join(map(str, self.shape))
        return f"{self.pattern} {self.dtype} [{shape}] x{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Line":
        """The inverse of `str`.

        Raises:
            ValueError: no such line, or its count is not that of its pattern.
        """
        match = re.fullmatch(r"(\S+) (\w+) \[([\d,]*)\] x(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no line of an inventory.")
        line = cls(match[1], match[2], tuple(map(int, match[3].split(","))))
        if line.count != int(match[4]):
            raise ValueError(f"{text!r} stands for {line.count} tensors.")
        return line


def inventory(cfg: ModelConfig, *, mtp_copies: bool | None = None) -> list[Line]:
    """Every tensor of the released form of a model, scales included.

    Args:
        cfg: the model; its `quantization` says whether matrices are FP8, MXFP4 or plain.
        mtp_copies: whether the MTP layer has copies of embedding and head; default: as released
            (DeepSeek's has, GLM's has not).
    """
    d, q, c = cfg.hidden_size, cfg.q_lora_rank, cfg.kv_lora_rank
    nope, rope, value = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    heads, index_heads, index_dim = cfg.num_attention_heads, cfg.index_n_heads, cfg.index_head_dim
    expert, shared = cfg.moe_intermediate_size, cfg.n_shared_experts * cfg.moe_intermediate_size
    with_mtp = cfg.num_nextn_predict_layers > 0
    last = cfg.num_hidden_layers
    every = [*range(last), last] if with_mtp else list(range(last))
    full = [layer for layer in every if cfg.is_full(layer)]
    sparse = [layer for layer in every if cfg.is_sparse(layer)]
    dense = [layer for layer in every if not cfg.is_sparse(layer)]

    root = {
        "model.embed_tokens.weight": (cfg.vocab_size, d),
        "model.norm.weight": (d,),
        **({} if cfg.tie_word_embeddings else {"lm_head.weight": (cfg.vocab_size, d)}),
    }
    attention = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_a_proj.weight": (q, d),
        "self_attn.q_a_layernorm.weight": (q,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q),
        "self_attn.kv_a_proj_with_mqa.weight": (c + rope, d),
        "self_attn.kv_a_layernorm.weight": (c,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), c),
        "self_attn.o_proj.weight": (d, heads * value),
    }
    indexer = {
        "self_attn.indexer.wq_b.weight": (index_heads * index_dim, q),
        "self_attn.indexer.wk.weight": (index_dim, d),
        "self_attn.indexer.weights_proj.weight": (index_heads, d),
        "self_attn.indexer.k_norm.weight": (index_dim,),
        "self_attn.indexer.k_norm.bias": (index_dim,),
    }

    def feed_forward(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}gate_proj.weight": (size, d),
            f"{prefix}up_proj.weight": (size, d),
            f"{prefix}down_proj.weight": (d, size),
        }

    experts = f"mlp.experts.{{0-{cfg.n_routed_experts - 1}}}."
    moe = {
        "mlp.gate.weight": (cfg.n_routed_experts, d),
        "mlp.gate.e_score_correction_bias": (cfg.n_routed_experts,),
        **feed_forward(experts, expert),
        **feed_forward("mlp.shared_experts.", shared),
    }
    mtp = {
        "enorm.weight": (d,),
        "hnorm.weight": (d,),
        "eh_proj.weight": (d, 2 * d),
        "shared_head.norm.weight": (d,),
    }
    if cfg.model_type == "deepseek_v32" if mtp_copies is None else mtp_copies:
        mtp |= {
            "embed_tokens.weight": (cfg.vocab_size, d),
            "shared_head.head.weight": (cfg.vocab_size, d),
        }
    groups: list[tuple[Sequence[int] | None, dict[str, tuple[int, ...]]]] = [
        (None, root),
        (every, attention),
        (full, indexer),
        (dense, feed_forward("mlp.", cfg.intermediate_size)),
        (sparse, moe),
        ([last] if with_mtp else [], mtp),
    ]
    return [
        line
        for layers, tensors in groups
        if layers is None or layers
        for name, shape in tensors.items()
        for line in _lines(cfg, layers, name, shape)
    ]


def _lines(
    cfg: ModelConfig, layers: Sequence[int] | None, name: str, shape: tuple[int, ...]
) -> Iterator[Line]:
    """A kind of tensor, split where only some layers' are quantised, with its scales."""
    norm, other = FLOATS[cfg.model_type]
    if cfg.dtype == "float32":
        norm = other = "F32"
    plain = norm if len(shape) == 1 else other
    if name.endswith("e_score_correction_bias"):
        plain = "F32"
    stored = block_format(cfg.quantization)
    if stored is None or cfg.quantization is None or name.split(".")[-2] not in _MATRICES:
        yield Line(_pattern(layers, name), plain, shape)
        return
    is_kept = kept_modules(cfg.quantization)
    each = re.sub(r"{(\d+)-\d+}", r"\1", name)
    kept = [layer for layer in layers or () if is_kept(f"model.layers.{layer}.{each}")]
    blocks = [layer for layer in layers or () if layer not in kept]
    if kept:
        yield Line(_pattern(kept, name), plain, shape)
    if blocks:
        pattern, layout = _pattern(blocks, name), Blocks(stored.kind, stored.block)
        dtype, scale_dtype = ("F8_E4M3", "F32") if stored.kind == "e4m3" else ("U8", "U8")
        yield Line(pattern, dtype, layout.byte_shape(shape))
        yield Line(stored.scale_of(pattern), scale_dtype, layout.scale_shape(shape))


def _pattern(layers: Sequence[int] | None, name: str) -> str:
    if layers is None:
        return name
    numbers = ",".join(map(str, layers))
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        numbers = f"{layers[0]}-{layers[-1]}"
    return f"model.layers.{numbers if len(layers) == 1 else '{' + numbers + '}'}.{name}"


def _ranges(pattern: str) -> list[list[int]]:
    found = []
    for text in re.findall(r"{(.*?)}", pattern):
        first, dash, last = text.partition("-")
        found.append(
            list(range(int(first), int(last) + 1)) if dash else [int(n) for n in text.split(",")]
        )
    return found
