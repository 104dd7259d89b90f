"""Sparse MLA, absorbed, over this rank's own selected rows, returning a partial (out, lse).

The latent of a row is both key and value; k_pe is one rotary key shared by all heads:
    s_k = scale * (q_latent . latent_k + q_pe . k_pe_k)
    out = sum_k softmax(s)_k latent_k,   lse = ln sum_k e^(s_k)
A query with no row gives (0, -inf), the identity of the merge in `lse_merge`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.blocking import BUDGET_BYTES, block_size, map_blocks
from pallas_kernels.dispatch import pick
from pallas_kernels.kv_layout import dequantize


class LatentPool(NamedTuple):
    """One rank's latent cache: float rows (scale None), or e4m3 bytes with 1x128 scales."""

    latent: Float[Array, "M C"] | UInt8[Array, "M C"]
    scale: Float[Array, "M tiles"] | None
    k_pe: Float[Array, "M R"]


def sparse_mla(
    q_latent: Float[Array, "B T H C"],
    q_pe: Float[Array, "B T H R"],
    pool: LatentPool,
    rows: Int32[Array, "B T K"],
    counts: Int32[Array, "B T"],
    *,
    scale: float,
    base_row: int | Int32[Array, ""] = 0,
    implementation: str | None = None,
    budget: int = BUDGET_BYTES,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H"]]:
    """Attention of each query to its first `counts` rows; softmax, sums and results in float32.

    Args:
        q_latent: queries projected into the latent space.
        q_pe: rotary part of the queries.
        pool: this rank's cache; a row read must have been written, the others may hold anything,
            NaN included.
        rows: pool rows per query, relative to `base_row`; entries at or after the count may be
            anything.
        counts: rows that exist, per query.
        scale: the softmax scale.
        base_row: first row of the layer's region in the pool.
        implementation: see `dispatch`.
        budget: bytes of gathered rows and scores at a time (at least one query's).
    """
    if (pool.latent.dtype == jnp.uint8) != (pool.scale is not None):
        given = "missing" if pool.scale is None else "given"
        raise ValueError(
            f"the latent pool is {pool.latent.dtype} with its scales {given}: e4m3 bytes need "
            "scales and other dtypes have none; pass a matching pair."
        )
    return pick("sparse_mla", implementation, {"xla": _sparse_mla_xla})(
        q_latent, q_pe, pool, rows, counts, scale=scale, base_row=base_row, budget=budget
    )


def _sparse_mla_xla(q_latent, q_pe, pool, rows, counts, *, scale, base_row, budget):
    batch, tokens, heads, rank = q_latent.shape
    rope, k = q_pe.shape[-1], rows.shape[-1]
    if k == 0:
        return (
            jnp.zeros((batch, tokens, heads, rank), jnp.float32),
            jnp.full((batch, tokens, heads), -jnp.inf, jnp.float32),
        )
    quantized = pool.latent.dtype == jnp.uint8
    dtype = q_latent.dtype if quantized else jnp.promote_types(q_latent.dtype, pool.latent.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def dot(spec, a, b):
        return jnp.einsum(
            spec,
            a.astype(dtype),
            b.astype(dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def attend(q_latent, q_pe, rows, counts):  # [n, H, C], [n, H, R], [n, K], [n]
        valid = jnp.arange(k, dtype=jnp.int32) < counts[:, None]
        rows = jnp.where(valid, rows, 0) + base_row
        latent = jnp.take(pool.latent, rows, axis=0, mode="clip")
        if quantized:
            latent = dequantize(latent, jnp.take(pool.scale, rows, axis=0, mode="clip"), dtype)
        k_pe = jnp.take(pool.k_pe, rows, axis=0, mode="clip")
        # Rows past the count may hold NaN, which a zero weight would not remove.
        latent = jnp.where(valid[..., None], latent, 0)
        scores = dot("nhc,nkc->nhk", q_latent, latent) + dot("nhr,nkr->nhk", q_pe, k_pe)
        scores = jnp.where(valid[:, None, :], scores * scale, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
        total = jnp.sum(weights, axis=-1)
        out = dot("nhk,nkc->nhc", weights, latent)
        empty = top[..., 0] == -jnp.inf
        out = jnp.where(empty[..., None], 0.0, out / jnp.where(empty, 1.0, total)[..., None])
        return out, jnp.where(empty, -jnp.inf, top[..., 0] + jnp.log(total))

    with jax.named_scope("sparse_mla"):
        per_query = k * (rank + rope) * (pool.latent.dtype.itemsize + dtype.itemsize + 4)
        per_query += k * heads * 12
        n = batch * tokens
        out, lse = map_blocks(
            attend,
            (
                q_latent.reshape(n, heads, rank),
                q_pe.reshape(n, heads, rope),
                rows.reshape(n, k),
                counts.reshape(n),
            ),
            axis=0,
            block=block_size(n, per_query, budget),
        )
    return out.reshape(batch, tokens, heads, rank), lse.reshape(batch, tokens, heads)
