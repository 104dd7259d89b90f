"""Lightning indexer over one rank's paged index keys.

    score[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])
The scales of the queries, D^-0.5 and Hi^-0.5 are positive, so the caller folds them into `weights`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.blocking import BUDGET_BYTES, block_size, map_blocks
from pallas_kernels.dispatch import pick
from pallas_kernels.kv_layout import e4m3_from_bytes
from pallas_kernels.topk import Candidates, local_topk

_MIN_KEYS = 256  # fewer keys a chunk would make thin matmuls: shorten the query block first


def index_scores(
    q: Float[Array, "B T Hi D"] | UInt8[Array, "B T Hi D"],
    weights: Float[Array, "B T Hi"],
    k_pool: Float[Array, "M D"] | UInt8[Array, "M D"],
    k_scale: Float[Array, " M"] | None,
    page_table: Int32[Array, "B P"],
    lengths: Int32[Array, "B T"],
    *,
    page_size: int,
    base_row: int | Int32[Array, ""] = 0,
    implementation: str | None = None,
    budget: int = BUDGET_BYTES,
) -> Float[Array, "B T S"]:
    """Scores of the S = P * page_size local keys, -inf at and after `lengths`.

    Args:
        q: index queries; float32, bfloat16, or e4m3 bytes (then the pool must be bytes too).
        weights: float32 weight per head, any sign.
        k_pool: index keys of this rank, flat over layers.
        k_scale: one scale per row, or None.
        page_table: page ids of each batch row; an id < 0 is no page, its keys are never visible.
        lengths: visible local keys per query.
        page_size: rows per page.
        base_row: first row of the layer's region in the pool.
        implementation: see `dispatch`.
        budget: bytes of intermediates at a time beside the result.
    """
    _check(q, k_pool)
    return pick("index_scores", implementation, {"xla": _index_scores_xla})(
        q,
        weights,
        k_pool,
        k_scale,
        page_table,
        lengths,
        page_size=page_size,
        base_row=base_row,
        budget=budget,
    )


def index_topk(
    q: Float[Array, "B T Hi D"] | UInt8[Array, "B T Hi D"],
    weights: Float[Array, "B T Hi"],
    k_pool: Float[Array, "M D"] | UInt8[Array, "M D"],
    k_scale: Float[Array, " M"] | None,
    page_table: Int32[Array, "B P"],
    lengths: Int32[Array, "B T"],
    k: int,
    *,
    page_size: int,
    base_row: int | Int32[Array, ""] = 0,
    implementation: str | None = None,
    budget: int = BUDGET_BYTES,
) -> Candidates:
    """`local_topk` of `index_scores`, in blocks of queries: large scores never exist whole."""
    _check(q, k_pool)
    return pick("index_topk", implementation, {"xla": _index_topk_xla})(
        q,
        weights,
        k_pool,
        k_scale,
        page_table,
        lengths,
        k,
        page_size=page_size,
        base_row=base_row,
        budget=budget,
    )


def _check(q, k_pool):
    if (q.dtype == jnp.uint8) != (k_pool.dtype == jnp.uint8):
        raise ValueError(
            f"index queries are {q.dtype} and index keys {k_pool.dtype}: "
            "e4m3 bytes meet only e4m3 bytes; quantise both or neither."
        )


def _index_topk_xla(
    q, weights, k_pool, k_scale, page_table, lengths, k, *, page_size, base_row, budget
):
    batch, tokens = lengths.shape
    per_query = (
        page_table.shape[1] * page_size * 24
    )  # scores, keys, and a sort of (key, index) pairs
    batch_block = block_size(batch, per_query, budget)
    token_block = block_size(tokens, per_query * batch_block, budget)

    def batch_rows(q, weights, page_table, lengths):
        def queries(q, weights, lengths):
            scores = _index_scores_xla(
                q,
                weights,
                k_pool,
                k_scale,
                page_table,
                lengths,
                page_size=page_size,
                base_row=base_row,
                budget=budget,
            )
            return local_topk(scores, lengths, k, implementation="xla")

        return map_blocks(queries, (q, weights, lengths), axis=1, block=token_block)

    return map_blocks(batch_rows, (q, weights, page_table, lengths), axis=0, block=batch_block)


def _index_scores_xla(
    q, weights, k_pool, k_scale, page_table, lengths, *, page_size, base_row, budget
):
    batch, tokens, heads, dim = q.shape
    # Per key: the gathered row in its own and in the compute dtype, and the scores of all heads of
    # all queries.
    per_key = dim * 8 + 8
    queries_fitting = max(1, budget // (batch * _MIN_KEYS) - per_key) // (heads * 8)
    token_block = block_size(tokens, 1, max(1, queries_fitting))
    page_block = block_size(
        page_table.shape[1],
        page_size * batch * (per_key + token_block * heads * 8),
        budget,
    )

    def queries(q, weights, lengths):
        return _score_pages(
            q, weights, k_pool, k_scale, page_table, lengths, page_size, base_row, page_block
        )

    with jax.named_scope("index_scores"):
        return map_blocks(queries, (q, weights, lengths), axis=1, block=token_block)


def _score_pages(q, weights, k_pool, k_scale, page_table, lengths, page_size, base_row, page_block):
    """Scores of one block of queries, in chunks of pages; those beyond every length are skipped."""
    batch, n_pages = page_table.shape
    n_keys, chunk = n_pages * page_size, page_block * page_size

    def score(pages, first_key):
        slots = jnp.arange(page_size, dtype=jnp.int32)
        rows = (base_row + jnp.maximum(pages, 0)[..., None] * page_size + slots).reshape(batch, -1)
        keys = jnp.take(k_pool, rows, axis=0, mode="clip")
        scores = _weighted_relu(q, weights, keys)
        if k_scale is not None:
            scores = scores * jnp.take(k_scale, rows, axis=0, mode="clip")[:, None, :]
        key_ids = first_key + jnp.arange(rows.shape[1], dtype=jnp.int32)
        return jnp.where(key_ids < lengths[..., None], scores, -jnp.inf)

    if n_pages <= page_block:
        return score(page_table, 0)

    def step(i, scores):
        # The last chunk starts early rather than run over the end; its first keys are computed
        # twice.
        page = jnp.minimum(i * page_block, n_pages - page_block)
        pages = lax.dynamic_slice_in_dim(page_table, page, page_block, axis=1)
        first_key = page * page_size
        return lax.dynamic_update_slice_in_dim(scores, score(pages, first_key), first_key, axis=2)

    # The first chunk stands before the loop so that the carry has its type (varying over mesh axes
    # in a shard_map).
    first = score(page_table[:, :page_block], 0)
    scores = jnp.pad(first, ((0, 0), (0, 0), (0, n_keys - chunk)), constant_values=-jnp.inf)
    longest = jnp.clip(jnp.max(lengths), 0, n_keys)
    return lax.fori_loop(1, (longest + chunk - 1) // chunk, step, scores)


def _weighted_relu(q, weights, keys):
    """sum_h weights * relu(q . k) in float32: [B, T, Hi, D], [B, T, Hi], [B, S, D] -> [B, T, S]."""
    if q.dtype == jnp.uint8:
        # e4m3 values are exact in bfloat16, and their products in float32.
        q, keys = (e4m3_from_bytes(x).astype(jnp.bfloat16) for x in (q, keys))
    dtype = jnp.promote_types(q.dtype, keys.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    per_head = jnp.einsum(
        "bthd,bsd->bths",
        q.astype(dtype),
        keys.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return jnp.einsum(
        "bths,bth->bts",
        jax.nn.relu(per_head),
        weights.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
