"""Bytes of weights and caches, per rank, from the configuration alone: no array, no jax.

`Layout` says how a model lies on its devices. Weight bytes are summed over the same parameters as
`model.param_defs` lists, cache bytes are those of `cache/pool.py`: a test holds them equal.

    rank_bytes(W) = latent/W + index/(1 if the index is replicated else W)       per token
    pages(W)      = floor(pool / (page_size * W * rank_bytes(W))),  tokens = pages * page_size * W
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import MAX_ROWS, pages_needed
from dcp_jax.layers.sizes import Sizes
from dcp_jax.quantization import FP8_CONFIG

WEIGHT_DTYPES = ("float32", "bfloat16", "fp8", "mxfp4")
KV_DTYPES = ("float32", "bfloat16", "fp8_e4m3")
BLOCK = 128  # channels that share a scale: of a latent, and each way of a block of weights


@dataclass(frozen=True)
class Layout:
    """How weights and caches lie on `tp` devices.

    Attributes:
        tp: devices in all.
        dcp_size: how many of them share the tokens of the caches.
        page_size: rows of a page on each rank.
        weights: what matrices are held in; "fp8" computes in bfloat16. "mxfp4" is for the routed
            experts alone, all else is bfloat16, as released.
        kv_dtype: of both caches.
        index_replicated: every rank holds the index K of all tokens.
        dcp_comm: collectives of the merge.
        with_mtp: weights and caches of the MTP layer are held as well.
        replicate_q_proj: each rank projects the queries of its whole DCP group, none are gathered.
        attention_dp: the alternative to DCP: requests are dealt to the ranks, each with the whole
            attention and its requests' whole caches; experts stay spread over all.
    """

    tp: int = 1
    dcp_size: int = 1
    page_size: int = 64
    weights: Literal["float32", "bfloat16", "fp8", "mxfp4"] = "bfloat16"
    kv_dtype: Literal["float32", "bfloat16", "fp8_e4m3"] = "bfloat16"
    index_replicated: bool = False
    dcp_comm: Literal["a2a", "ag_rs"] = "a2a"
    with_mtp: bool = False
    replicate_q_proj: bool = False
    attention_dp: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r} is not a count: give a whole number of at least 1"
            for name in ("tp", "dcp_size", "page_size")
            if type(value := getattr(self, name)) is not int or value < 1
        ]
        for name, allowed in (
            ("weights", WEIGHT_DTYPES),
            ("kv_dtype", KV_DTYPES),
            ("dcp_comm", ("a2a", "ag_rs")),
        ):
            if getattr(self, name) not in allowed:
                problems.append(f"{name}={getattr(self, name)!r}: use one of {', '.join(allowed)}")
        if not problems and self.tp % self.dcp_size:
            problems.append(
                f"dcp_size={self.dcp_size} does not divide tp={self.tp}, whose ranks a DCP group "
                f"is made of: use one of {[w for w in range(1, self.tp + 1) if self.tp % w == 0]}"
            )
        if not problems and self.attention_dp and self.dcp_size > 1:
            problems.append(
                f"attention_dp with dcp_size={self.dcp_size}: a request's caches lie whole on one "
                "rank there; use dcp_size=1"
            )
        if problems:
            raise ValueError("; ".join(problems) + ".")

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.weights == "float32" else 2

    @property
    def page_tokens(self) -> int:
        """Tokens of one page over all ranks: prefixes are shared in multiples of it."""
        return self.page_size * self.dcp_size

    def heads(self, cfg: ModelConfig) -> int:
        """Attention heads whose outputs a rank owns."""
        return sizes(cfg, self).heads // (1 if self.attention_dp else self.tp)


def sizes(cfg: ModelConfig, layout: Layout) -> Sizes:
    """Global sizes in memory, padded for the layout (quantised matrices in whole blocks)."""
    if layout.weights in ("fp8", "mxfp4") and cfg.quantization is None:
        cfg = replace(cfg, quantization=FP8_CONFIG)
    return Sizes.padded(cfg, layout.tp)


class Weight(NamedTuple):
    """One parameter: its path in `param_defs`, global shape, and what it is held in.

    `kind` is "matrix" (the layout's dtype), "float" (never quantised) or "float32".
    """

    path: str
    shape: tuple[int, ...]
    kind: str
    sharded: bool
    group: str


@lru_cache(maxsize=64)
def parameters(cfg: ModelConfig, layout: Layout) -> tuple[Weight, ...]:
    """Every parameter of the model, as `dcp_jax.model.Transformer` has them."""
    held, d = sizes(cfg, layout), cfg.hidden_size
    found = [
        Weight("embed", (held.vocab, d), "float", True, "embedding"),
        Weight("norm", (d,), "float", False, "norms"),
        Weight("lm_head", (held.vocab, d), "float", True, "head"),
    ]
    for i in range(cfg.num_hidden_layers):
        path = f"layers/{i}"
        found += _layer(cfg, layout, held, path, cfg.is_full(i), cfg.is_sparse(i))
    if layout.with_mtp and cfg.num_nextn_predict_layers:
        extra = [
            Weight(f"mtp/{n}", (d,), "float", False, "mtp") for n in ("enorm", "hnorm", "norm")
        ]
        extra.append(Weight("mtp/eh_proj", (d, 2 * d), "float", False, "mtp"))
        extra += _layer(cfg, layout, held, "mtp/layer", True, True)
        found += [weight._replace(group="mtp") for weight in extra]
    return tuple(found)


def _layer(cfg, layout, held, path, full, sparse) -> Iterator[Weight]:
    d, rank, q_rank = cfg.hidden_size, cfg.kv_lora_rank, cfg.q_lora_rank
    heads, split = held.heads, not layout.attention_dp
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Weight(f"{path}/{norm}", (d,), "float", False, "norms")
    for name, shape, sharded in (
        ("q_a_proj", (q_rank, d), False),
        ("kv_a_proj", (rank + cfg.qk_rope_head_dim, d), False),
        ("q_b_proj", (heads, cfg.qk_head_dim, q_rank), split),
        ("w_uk", (heads, cfg.qk_nope_head_dim, rank), split),
        ("w_uv", (heads, cfg.v_head_dim, rank), split),
        ("o_proj", (d, heads, cfg.v_head_dim), split),
    ):
        yield Weight(f"{path}/attn/{name}", shape, "matrix", sharded, "attention")
    yield Weight(f"{path}/attn/q_a_layernorm", (q_rank,), "float", False, "norms")
    yield Weight(f"{path}/attn/kv_a_layernorm", (rank,), "float", False, "norms")
    if full:
        index_heads, dim = cfg.index_n_heads, cfg.index_head_dim
        for name, shape, kind in (
            ("wq_b", (index_heads, dim, q_rank), "matrix"),
            ("wk", (dim, d), "matrix"),
            ("weights_proj", (index_heads, d), "float"),
            ("k_norm_weight", (dim,), "float32"),
            ("k_norm_bias", (dim,), "float32"),
        ):
            yield Weight(f"{path}/attn/indexer/{name}", shape, kind, False, "indexer")
    if not sparse:
        yield from _swiglu(f"{path}/mlp", d, held.intermediate, "dense")
        return
    experts, width = cfg.n_routed_experts, held.moe_intermediate
    yield Weight(f"{path}/mlp/gate", (experts, d), "float32", False, "router")
    yield Weight(f"{path}/mlp/e_score_correction_bias", (experts,), "float32", False, "router")
    for name, shape in (
        ("experts_gate_up", (experts, 2, width, d)),
        ("experts_down", (experts, d, width)),
    ):
        yield Weight(f"{path}/mlp/{name}", shape, "matrix", True, "experts")
    if held.shared_intermediate:
        yield from _swiglu(f"{path}/mlp/shared", d, held.shared_intermediate, "shared experts")


def _swiglu(path: str, d: int, width: int, group: str) -> Iterator[Weight]:
    yield Weight(f"{path}/gate_up_proj", (2, width, d), "matrix", True, group)
    yield Weight(f"{path}/down_proj", (d, width), "matrix", True, group)


@lru_cache(maxsize=64)
def _weight_groups(cfg: ModelConfig, layout: Layout) -> tuple[tuple[str, int], ...]:
    groups: dict[str, int] = {}
    for weight in parameters(cfg, layout):
        count = math.prod(weight.shape) // (layout.tp if weight.sharded else 1)
        if weight.kind == "float32":
            size = 4 * count
        elif weight.kind == "matrix" and layout.weights == "fp8":
            size = count + 4 * -(-count // BLOCK**2)
        elif weight.group == "experts" and layout.weights == "mxfp4":
            size = count // 2 + count // 32
        else:
            size = layout.activation_bytes * count
        groups[weight.group] = groups.get(weight.group, 0) + size
    if layout.replicate_q_proj and layout.dcp_size > 1:
        groups["replicated queries"] = cfg.num_hidden_layers * q_replication_bytes(cfg, layout)
    return tuple(groups.items())


def weight_bytes(cfg: ModelConfig, layout: Layout) -> dict[str, int]:
    """Bytes of the weights on one rank, by group, padding included.

    fp8 matrices have a float32 scale per block of 128 x 128 (counted by area), mxfp4 experts a byte
    of scale per 32 values.
    """
    return dict(_weight_groups(cfg, layout))


def q_replication_bytes(cfg: ModelConfig, layout: Layout) -> int:
    """Weights per layer that a rank holds and reads more when it projects its group's queries.

    heads/N * (W-1) * (q_lora_rank * qk_head_dim + qk_nope_head_dim * kv_lora_rank)
    """
    per_head = cfg.q_lora_rank * cfg.qk_head_dim + cfg.qk_nope_head_dim * cfg.kv_lora_rank
    item = 1 if layout.weights == "fp8" else layout.activation_bytes
    return layout.heads(cfg) * (layout.dcp_size - 1) * per_head * item


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of the caches per token.

    Attributes:
        latent_row: of one layer's latent and k_pe, with scales.
        index_row: of one full layer's index key, with its scale.
        layers: with a latent cache.
        index_layers: with an index cache.
    """

    latent_row: int
    index_row: int
    layers: int
    index_layers: int

    @classmethod
    def of(cls, cfg: ModelConfig, layout: Layout) -> "CacheBytes":
        """As `cache/pool.py` stores rows (e4m3: 656 and 132 bytes in the released models)."""
        rank, rope, dim = cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.index_head_dim
        if layout.kv_dtype == "fp8_e4m3":
            rows = rank + 4 * -(-rank // BLOCK) + 2 * rope, dim + 4
        else:
            item = 4 if layout.kv_dtype == "float32" else 2
            rows = item * (rank + rope), item * dim
        mtp = cfg.num_nextn_predict_layers if layout.with_mtp else 0
        return cls(*rows, cfg.num_hidden_layers + mtp, len(cfg.full_layers) + mtp)

    @property
    def latent(self) -> int:
        """Latent bytes of a token over all layers."""
        return self.layers * self.latent_row

    @property
    def index(self) -> int:
        """Index K bytes of a token over all layers."""
        return self.index_layers * self.index_row

    def rank_bytes(self, dcp_size: int, index_replicated: bool = False) -> float:
        """Bytes on one rank per token of the whole pool."""
        return self.latent / dcp_size + self.index / (1 if index_replicated else dcp_size)

    def ratio(self, dcp_size: int, index_replicated: bool = False, lost: float = 0.0) -> float:
        """Tokens that fit, over those of dcp_size=1, if DCP costs the share `lost` of the pool."""
        return (1 - lost) * self.rank_bytes(1) / self.rank_bytes(dcp_size, index_replicated)

    def replication_cost(self, dcp_size: int) -> float:
        """Memory per token of a replicated index over a sharded one, less 1."""
        return self.rank_bytes(dcp_size, True) / self.rank_bytes(dcp_size) - 1


@dataclass(frozen=True)
class Pool:
    """The caches of one layout.

    Attributes:
        pages: in all (with attention data parallelism: on each rank).
        page_tokens: tokens of a page over all ranks.
        rank_tokens: latent rows per layer on one rank.
        tokens: that fit over all ranks.
        largest_request: tokens of the longest single request.
        rank_bytes: bytes of each cache on one rank.
    """

    pages: int
    page_tokens: int
    rank_tokens: int
    tokens: int
    largest_request: int
    rank_bytes: dict[str, int]

    def requests(self, context: int) -> int:
        """How many requests of `context` tokens fit."""
        copies = self.tokens // self.largest_request if self.pages else 0
        return copies * (self.pages // pages_needed(context, self.page_tokens, 1))


def pool_of(cfg: ModelConfig, layout: Layout, pages: int) -> Pool:
    """What `pages` pages hold and cost."""
    cache, rows = CacheBytes.of(cfg, layout), pages * layout.page_size
    copies = layout.dcp_size if layout.index_replicated else 1
    held = pages * layout.page_tokens
    return Pool(
        pages=pages,
        page_tokens=layout.page_tokens,
        rank_tokens=rows,
        tokens=held * (layout.tp if layout.attention_dp else 1),
        largest_request=held,
        rank_bytes={"latent": rows * cache.latent, "index_k": rows * copies * cache.index},
    )


def largest_pool(cfg: ModelConfig, layout: Layout, budget_bytes: float) -> Pool:
    """The most whole pages in `budget_bytes` per rank, and within int32 row numbers."""
    page = sum(pool_of(cfg, layout, 1).rank_bytes.values())
    # The budget may be infinite, where nothing is known of the device.
    pages = min(budget_bytes / page, most_pages(cfg, layout))
    return pool_of(cfg, layout, max(0, math.floor(pages)))


def most_pages(cfg: ModelConfig, layout: Layout) -> int:
    """Pages whose rows, over all layers, int32 can number."""
    cache = CacheBytes.of(cfg, layout)
    copies = layout.dcp_size if layout.index_replicated else 1
    return MAX_ROWS // (layout.page_size * max(cache.layers, cache.index_layers * copies))
