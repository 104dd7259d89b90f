"""Bytes that one rank receives in a step, by kind: the formulas of `dcp/collectives.py`.

With n query tokens, h = heads/N of a rank's own, W ranks, C candidates and s bytes an activation,
S local keys a row (whole pages and chunks), per layer (candidates: per full layer):

    q            (W-1) n h (kv_lora_rank + rope) s
    candidates   (W-1) n C (6, or 8 beyond 65,536 keys a rank)
    merge, a2a   (W-1) n h (kv_lora_rank s + 4)
    merge, ag_rs (W-1) n h (kv_lora_rank 4 + 4 W)
    latent       (W-1) B S latent_row                        (instead of q and merge: `GATHERED`
                                                             kinds, `MHA_ONE_SHOT` with a prefix)
    index_k      (W-1) B S index_row                         (`GATHERED` kinds, per full layer)
    topk         (W-1) B ceil(T/W) K 4                       (split indexer, per full layer)
    tp_sum       2 (N-1)/N n d s, twice per layer and once for the embedding (ring)
    argmax       (N-1) B 8
    logits       (N-1)/N B V 4                               (when tokens are drawn)

`dcp/traffic.py` reads the same numbers from a traced step, and a test holds them equal.
"""

import math
from dataclasses import dataclass
from typing import Literal

from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import gather_chunks
from dcp_jax.plan.memory import CacheBytes, Layout, sizes
from dcp_jax.policy import PrefillPath

# Local indices of up to this many keys a rank travel as 16 bits (`pallas_kernels.topk`).
MAX_NARROW_KEYS = 2**16


def candidates(index_topk: int, dcp_size: int, pruned: bool = True) -> int:
    """Pairs that each rank sends per query token: K, or K/W plus 8 sigma of an even spread."""
    if not pruned:
        return index_topk
    sigma = math.sqrt(index_topk * (dcp_size - 1)) / dcp_size
    return min(index_topk, math.ceil(index_topk / dcp_size + 8 * sigma))


def pair_bytes(keys_per_rank: int) -> int:
    """Bytes of one candidate: its 32-bit key and a local index of 16 or 32 bits."""
    return 6 if keys_per_rank <= MAX_NARROW_KEYS else 8


@dataclass(frozen=True)
class LayerExchange:
    """Bytes that one rank receives in one layer."""

    q: int
    candidates: int
    merge: int


def layer_exchange(
    cfg: ModelConfig, layout: Layout, tokens: int, *, pairs: int, bytes_per_pair: int
) -> LayerExchange:
    """What one (full) layer of the owned path exchanges for `tokens` query tokens.

    Args:
        cfg: the model.
        layout: its layout; with dcp_size=1 nothing is exchanged.
        tokens: query tokens, over all rows.
        pairs: candidates that each rank sends per query token.
        bytes_per_pair: of a candidate.
    """
    others, heads = layout.dcp_size - 1, layout.heads(cfg)
    rank, item = cfg.kv_lora_rank, layout.activation_bytes
    per_head = rank * 4 + 4 * layout.dcp_size if layout.dcp_comm == "ag_rs" else rank * item + 4
    gathered = 0 if layout.replicate_q_proj else rank + cfg.qk_rope_head_dim
    return LayerExchange(
        q=others * tokens * heads * gathered * item,
        candidates=0 if layout.index_replicated else others * tokens * pairs * bytes_per_pair,
        merge=others * tokens * heads * per_head,
    )


@dataclass(frozen=True)
class StepShape:
    """A step's shapes, as the runner pads them.

    Attributes:
        rows: sequences.
        tokens: new tokens of each.
        pages: entries of a row's page table.
        path: how attention meets the cache; decode is `OWNED`.
        candidates: "pruned" or "full".
        gather_chunk_tokens: keys gathered at a time by the `GATHERED` kinds, over ranks and rows.
        with_prefix: rows may have cached tokens: `MHA_ONE_SHOT` gathers the whole table then.
        sampled: the next tokens are drawn, which takes the logits of the whole vocabulary.
    """

    rows: int
    tokens: int
    pages: int
    path: PrefillPath = PrefillPath.OWNED
    candidates: Literal["pruned", "full"] = "pruned"
    gather_chunk_tokens: int = 32768
    with_prefix: bool = True
    sampled: bool = False

    def chunks(self, layout: Layout) -> tuple[int, int]:
        """How a `GATHERED` kind cuts the keys: (chunks, local keys of a row in each)."""
        size = layout.page_size
        count, pages = gather_chunks(
            self.pages, size, self.rows, layout.dcp_size, self.gather_chunk_tokens
        )
        return count, pages * size

    def selected(self, cfg: ModelConfig, layout: Layout) -> int:
        """Entries that a `GATHERED` kind has of each query's selection."""
        chunks, width = self.chunks(layout)
        local = self.pages * layout.page_size if layout.index_replicated else chunks * width
        return min(cfg.index_topk, local * layout.dcp_size)


def exchange_bytes(cfg: ModelConfig, layout: Layout, shape: StepShape) -> dict[str, int]:
    """Bytes that one rank receives in a step of the main model, by kind; absent kinds are 0."""
    tp, n = layout.tp, shape.rows * shape.tokens
    found = _dcp_bytes(cfg, layout, shape) if layout.dcp_size > 1 else {}
    if tp > 1:
        one_sum = round(2 * (tp - 1) / tp * n * cfg.hidden_size * layout.activation_bytes)
        found["tp_sum"] = (2 * cfg.num_hidden_layers + 1) * one_sum
        found["argmax"] = (tp - 1) * shape.rows * 8
        if shape.sampled:
            found["logits"] = (tp - 1) * shape.rows * sizes(cfg, layout).vocab // tp * 4
    return {kind: size for kind, size in found.items() if size}


def _dcp_bytes(cfg: ModelConfig, layout: Layout, shape: StepShape) -> dict[str, int]:
    """What the ranks of a DCP group receive from each other, by the path of the step."""
    others, layers, full = layout.dcp_size - 1, cfg.num_hidden_layers, len(cfg.full_layers)
    cache, local = CacheBytes.of(cfg, layout), shape.pages * layout.page_size
    if shape.path is PrefillPath.MHA_ONE_SHOT:
        keys = shape.rows * local if shape.with_prefix else 0
        return {"latent": layers * others * keys * cache.latent_row}
    if shape.path.gathers:
        chunks, width = shape.chunks(layout)
        keys = shape.rows * chunks * width
        found = {"latent": layers * others * keys * cache.latent_row}
        if not layout.index_replicated:
            found["index_k"] = full * others * keys * cache.index_row
        if shape.path is PrefillPath.GATHERED_SPLIT_INDEXER:
            scored = shape.rows * -(-shape.tokens // layout.dcp_size)
            found["topk"] = full * others * scored * shape.selected(cfg, layout) * 4
        return found
    pairs = min(candidates(cfg.index_topk, layout.dcp_size, shape.candidates == "pruned"), local)
    tokens = shape.rows * shape.tokens
    each = layer_exchange(cfg, layout, tokens, pairs=pairs, bytes_per_pair=pair_bytes(local))
    return {
        "q": layers * each.q,
        "candidates": full * each.candidates,
        "merge": layers * each.merge,
    }


def collectives_per_step(cfg: ModelConfig, layout: Layout) -> int:
    """Exchanges of a decode step that DCP adds, each costing a latency.

    L * (c_q + c_merge) + L_full: c_q is 0 if queries are replicated, c_merge 2 for `ag_rs`.
    """
    if layout.dcp_size == 1:
        return 0
    per_layer = (0 if layout.replicate_q_proj else 1) + (2 if layout.dcp_comm == "ag_rs" else 1)
    full = 0 if layout.index_replicated else len(cfg.full_layers)
    return cfg.num_hidden_layers * per_layer + full
