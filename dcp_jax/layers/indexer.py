"""The lightning indexer: which cached tokens a query token attends to.

    score[t, u] = sum_h weights[t, h] * relu(q[t, h] . k[u])      (DeepSeek-V3.2, arXiv 2512.02556)

and the selection is the exact top `index_topk` of the visible tokens in the total order (score
descending, then position ascending), the same set on every rank and for every dcp_size.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from dcp_jax.cache.pool import CacheSpec, KVCache, write_index
from dcp_jax.config import ModelConfig
from dcp_jax.dcp import layout
from dcp_jax.dcp.collectives import axis_size, gather_candidates, gather_keys
from dcp_jax.dcp.step import DcpStep, StepOptions
from dcp_jax.layers.gathered import chunks_of, fold_chunks, gather_chunk
from dcp_jax.layers.linear import einsum, linear, linear32
from dcp_jax.layers.norms import layer_norm
from dcp_jax.layers.param import param
from dcp_jax.layers.rope import apply_rope
from dcp_jax.mesh import DCP
from dcp_jax.policy import PrefillPath
from pallas_kernels import kv_layout
from pallas_kernels.indexer import index_topk
from pallas_kernels.topk import (
    MAX_NARROW_KEYS,
    Candidates,
    join_candidates,
    merge_candidates,
)


class Selection(NamedTuple):
    """What a full layer selected, and the shared layers after it reuse.

    On the `OWNED` path the entries are this rank's share, `index` being local indices; on the
    `GATHERED` kinds they are the whole selection, `index` being positions in ascending order. Only
    the first `counts` entries of a row mean anything. `MHA_ONE_SHOT` has no selection.

    Attributes:
        index: int32 [B, T, K].
        rows: int32 [B, T, K], pool rows of `index` within a layer's region (`OWNED` only).
        counts: int32 [B, T].
        certified: bool [B, T], False where pruned candidates may have missed a key.
    """

    index: Int[Array, "B T K"]
    rows: Int[Array, "B T K"] | None
    counts: Int[Array, "B T"]
    certified: Bool[Array, "B T"]


class IndexQueries(NamedTuple):
    """Queries as the score op takes them; `weights` hold every scalar factor of the score."""

    q: Shaped[Array, "B T H D"]
    weights: Float[Array, "B T H"]


class Indexer(nnx.Module):
    """Weights of one full layer's indexer, whole on every rank: each scores its own keys."""

    def __init__(self, cfg: ModelConfig, dtype: jnp.dtype):
        """Parameters in `dtype`, the key norm in float32."""
        self.rope_dim = cfg.qk_rope_head_dim
        self.interleaved = cfg.indexer_rope_interleave
        heads, dim = cfg.index_n_heads, cfg.index_head_dim
        self.wq_b = param((heads, dim, cfg.q_lora_rank), dtype)
        self.wk = param((dim, cfg.hidden_size), dtype)
        self.weights_proj = param((heads, cfg.hidden_size), dtype)
        self.k_norm_weight = param((dim,), jnp.float32)
        self.k_norm_bias = param((dim,), jnp.float32)

    def queries(
        self, q_latent: Array, x: Array, rope: tuple, fp8: bool, rotate: bool
    ) -> IndexQueries:
        """Queries [B, T, heads, dim] from the normalised query latent, weights from the input."""
        q = self._position(einsum("btq,hdq->bthd", q_latent, self.wq_b[...]), rope, rotate)
        heads, dim = q.shape[-2:]
        weights = linear32(x, self.weights_proj[...]) * (heads * dim) ** -0.5
        if fp8:
            q, scale = kv_layout.quantize_index(q)
            weights = weights * scale
        return IndexQueries(q, weights)

    def keys(self, x: Array, rope: tuple, fp8: bool, rotate: bool) -> tuple[Array, Array | None]:
        """Keys [B, T, dim] to cache, with their scales if they are e4m3."""
        k = layer_norm(linear(x, self.wk[...]), self.k_norm_weight[...], self.k_norm_bias[...])
        k = self._position(k, rope, rotate)
        return kv_layout.quantize_index(k) if fp8 else (k, None)

    def _position(self, x: Array, rope: tuple, rotate: bool) -> Array:
        """RoPE on the first channels (the MLA has it on the last), then Hadamard if asked."""
        turned = apply_rope(x[..., : self.rope_dim], rope, interleaved=self.interleaved)
        x = jnp.concatenate([turned, x[..., self.rope_dim :]], axis=-1)
        return kv_layout.hadamard(x) if rotate else x


def write_keys(
    indexer: Indexer,
    x: Float[Array, "B T d"],
    cache: KVCache,
    ordinal: int,
    *,
    rope: tuple,
    spec: CacheSpec,
    step: DcpStep,
    opts: StepOptions,
) -> KVCache:
    """Write this step's index keys to region `ordinal` of the index cache.

    Args:
        indexer: weights of the layer.
        x: input of the attention (after input_layernorm).
        cache: both caches.
        ordinal: which of the layers with an index cache this is.
        rope: cos and sin of the step's positions.
        spec: sizes of the caches.
        step: this rank's indices.
        opts: static options.
    """
    keys, scale = indexer.keys(x, rope, spec.fp8, _rotate(spec, opts))
    rows = step.index_write_rows if spec.index_replicated else step.write_rows
    flat = layout.layer_row(rows, ordinal, spec.index_rows, spec.index_layers)
    return write_index(cache, flat, keys, scale)


def select(
    indexer: Indexer,
    x: Float[Array, "B T d"],
    q_latent: Float[Array, "B T Q"],
    cache: KVCache,
    ordinal: int,
    *,
    rope: tuple,
    index_topk_size: int,
    spec: CacheSpec,
    step: DcpStep,
    opts: StepOptions,
) -> Selection:
    """The best `index_topk_size` visible keys of each query, by the path of the step.

    Args:
        indexer: weights of the layer.
        x: input of the attention (after input_layernorm).
        q_latent: normalised query latent.
        cache: caches that hold this step's keys already.
        ordinal: which region of the index cache is this layer's.
        rope: cos and sin of the step's positions.
        index_topk_size: K.
        spec: sizes of the caches.
        step: this rank's indices.
        opts: static options.
    """
    queries = indexer.queries(q_latent, x, rope, spec.fp8, _rotate(spec, opts))
    # A selection is a set of integers: the step's derivative takes it as it is (the indexer has a
    # training objective of its own).
    queries, cache = jax.lax.stop_gradient(queries), _detach_index(cache)
    base = ordinal * spec.index_rows
    several = axis_size(DCP) > 1
    if opts.path.gathers and several:
        return _select_gathered(queries, cache, base, index_topk_size, spec, step, opts)
    if spec.index_replicated and several:
        return _select_from_replica(queries, cache, base, index_topk_size, spec, step, opts)
    return _select_owned(queries, cache, base, index_topk_size, spec, step, opts)


def _rotate(spec: CacheSpec, opts: StepOptions) -> bool:
    return spec.fp8 if opts.index_hadamard is None else opts.index_hadamard


def _detach_index(cache: KVCache) -> KVCache:
    return replace(cache, index_k=jax.lax.stop_gradient(cache.index_k))


def _select_owned(queries, cache, base, k, spec, step, opts) -> Selection:
    """Local top candidates of every rank, one exchange, and the own part of the global top-k."""
    ranks = axis_size(DCP)
    keys_here = step.page_table.shape[1] * spec.page_size
    candidates = index_topk(
        queries.q,
        queries.weights,
        cache.index_k,
        cache.index_scale,
        step.page_table,
        step.local_visible,
        k=min(opts.candidate_count(k, ranks), keys_here),
        page_size=spec.page_size,
        base_row=base,
        implementation=opts.kernels,
    )
    rows = _pool_rows(step.page_table, candidates.index, spec.page_size)
    if ranks == 1:
        counts = jnp.minimum(step.visible, k)
        return Selection(candidates.index, rows, counts, jnp.ones_like(step.valid))
    everyone = gather_candidates(candidates, wide=keys_here > MAX_NARROW_KEYS)
    merge = merge_candidates(*everyone, step.visible, step.rank, k=k)
    return Selection(candidates.index, rows, merge.count, merge.certified)


def _select_from_replica(queries, cache, base, k, spec, step, opts) -> Selection:
    """Global top-k from this rank's copy of every key; keep the owned part. No exchange."""
    chosen = _topk_of_replica(queries, step.visible, cache, base, k, spec, step, opts)
    ranks = axis_size(DCP)
    width = chosen.shape[-1]
    selected = jnp.arange(width) < jnp.minimum(step.visible, k)[..., None]
    mine = selected & (layout.owner(chosen, ranks) == step.rank)
    # Owned entries first, in the order of the selection.
    order = jnp.argsort(~mine, axis=-1, stable=True)
    index = layout.local_index(jnp.take_along_axis(chosen, order, axis=-1), ranks)
    rows = _pool_rows(step.page_table, index, spec.page_size)
    return Selection(index, rows, jnp.sum(mine, -1, dtype=jnp.int32), jnp.ones_like(step.valid))


def _select_gathered(queries, cache, base, k, spec, step, opts) -> Selection:
    """The whole selection on every rank: of every query, or of 1/W of them and then exchanged."""
    tokens, visible = step.visible.shape[1], step.visible
    split = opts.path is PrefillPath.GATHERED_SPLIT_INDEXER
    if split:
        queries, visible = (_own_queries(x, step.rank) for x in (queries, visible))
    best = _topk_of_replica if spec.index_replicated else _topk_of_chunks
    index = best(queries, visible, cache, base, k, spec, step, opts)
    if split:
        index = gather_keys(index, "topk")[:, :tokens]
    counts = jnp.minimum(step.visible, k)
    # Ascending positions let a chunk of keys find its part of a row by two counts.
    entry = jnp.arange(index.shape[-1])
    index = jnp.sort(jnp.where(entry < counts[..., None], index, jnp.iinfo(jnp.int32).max), axis=-1)
    return Selection(index, None, counts, jnp.ones_like(step.valid))


def _own_queries(leaves: Any, rank: Int[Array, ""]) -> Any:
    """Tokens rank, rank + W, ... of each [B, T, ...]: every rank gets long and short rows alike."""
    ranks = axis_size(DCP)

    def own(x):
        padding = layout.padded(x.shape[1], ranks) - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, padding), *(((0, 0),) * (x.ndim - 2))))
        x = x.reshape(x.shape[0], -1, ranks, *x.shape[2:])
        return jax.lax.dynamic_index_in_dim(x, rank, axis=2, keepdims=False)

    return jax.tree.map(own, leaves)


def _topk_of_chunks(queries, visible, cache, base, k, spec, step, opts) -> Int[Array, "B T K"]:
    """Global top-k from index keys gathered chunk by chunk: the best so far joined with each."""
    chunks = chunks_of(step, spec.page_size, opts.gather_chunk_tokens)
    batch, width = step.page_table.shape[0], chunks.width
    k = min(k, chunks.count * width)
    # The gathered keys in pages of their own, so that they are scored in blocks of pages.
    pages = jnp.arange(batch * chunks.pages, dtype=jnp.int32).reshape(batch, -1)

    def best_of(number) -> Candidates:
        keys, scale = gather_chunk(
            (cache.index_k, cache.index_scale), base, chunks, number, "index_k"
        )
        start = number * width
        found = index_topk(
            queries.q,
            queries.weights,
            keys,
            scale,
            pages,
            jnp.clip(visible - start, 0, width),
            k=k,
            page_size=width // chunks.pages,
            implementation=opts.kernels,
        )
        return Candidates(found.keys, found.index + start)

    return fold_chunks(chunks, best_of, join_candidates).index


def _topk_of_replica(queries, visible, cache, base, k, spec, step, opts) -> Int[Array, "B T K"]:
    keys_here = step.page_table.shape[1] * spec.index_page_size
    return index_topk(
        queries.q,
        queries.weights,
        cache.index_k,
        cache.index_scale,
        step.page_table,
        visible,
        k=min(k, keys_here),
        page_size=spec.index_page_size,
        base_row=base,
        implementation=opts.kernels,
    ).index


def _pool_rows(page_table: Array, index: Array, page_size: int) -> Int[Array, "B T K"]:
    """Pool rows of local indices [B, T, K]."""
    pages = jax.vmap(lambda table, number: table.at[number].get(mode="clip"))(
        page_table, index // page_size
    )
    return layout.pool_row(pages, index, page_size)
