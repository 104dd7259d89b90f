"""Dense attention in the un-absorbed form, for batches whose every visible key would be selected.

    k[u] = [W_uk kv_c[u] ; k_pe[u]],  v[u] = W_uv kv_c[u],  o[t] = sum_u softmax(q[t] . k[u]) v[u]

Cheaper than the absorbed form (heads of qk_head_dim instead of kv_lora_rank + rope), and nothing is
scored or selected.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dcp_jax.cache.pool import CacheSpec, KVCache
from dcp_jax.dcp.step import DcpStep, StepOptions
from dcp_jax.layers.gathered import Chunks, gather_chunk
from dcp_jax.layers.linear import einsum
from dcp_jax.layers.quantized import BlockWeight
from pallas_kernels.dense_attention import dense_attention
from pallas_kernels.kv_layout import dequantize, quantize_latent
from pallas_kernels.sparse_mla import LatentPool


def attend_dense(
    q: Float[Array, "B T H D"],
    kv_c: Float[Array, "B T C"],
    k_pe: Float[Array, "B T R"],
    cache: KVCache,
    base: int,
    w_uk: Float[Array, "H n C"] | BlockWeight,
    w_uv: Float[Array, "H v C"] | BlockWeight,
    *,
    scale: float,
    spec: CacheSpec,
    step: DcpStep,
    opts: StepOptions,
) -> Float[Array, "B T H v"]:
    """Own heads over every visible key.

    Without a prefix the keys are the step's own tokens, as the cache would give them back, and
    nothing is exchanged; with one, every rank's rows of the batch are all-gathered at once (a
    policy takes this path for short rows only): S/W*row_bytes to each other rank.
    """
    if opts.with_prefix:
        every = Chunks(step.page_table, 1, step.page_table.shape[1], spec.page_size)
        flat = LatentPool(*gather_chunk(tuple(cache.latent_pool), base, every, 0, "latent"))
        keys = (q.shape[0], every.width, -1)
        kv_c, k_pe = _as_floats(flat, q.dtype)
        kv_c, k_pe = kv_c.reshape(keys), k_pe.reshape(keys)
    else:
        latent, scales = quantize_latent(kv_c) if spec.fp8 else (kv_c, None)
        pool = cache.latent_pool
        stored = LatentPool(latent.astype(pool.latent.dtype), scales, k_pe.astype(pool.k_pe.dtype))
        kv_c, k_pe = _as_floats(stored, q.dtype)
    # Rows that were never written may hold anything; a weight of zero would not remove NaN.
    longest = jnp.max(step.visible, axis=1)[:, None, None]
    written = jnp.arange(kv_c.shape[1])[:, None] < longest
    kv_c, k_pe = (jnp.where(written, rows, 0) for rows in (kv_c, k_pe))
    k_nope = einsum("bsc,hnc->bshn", kv_c, w_uk)
    shared = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:-1], k_pe.shape[-1]))
    return dense_attention(
        q,
        jnp.concatenate([k_nope, shared], axis=-1),
        einsum("bsc,hvc->bshv", kv_c, w_uv),
        step.visible,
        scale=scale,
        implementation=opts.kernels,
    )


def _as_floats(rows: LatentPool, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Stored latents and rotary keys as the products take them."""
    if rows.scale is None:
        return rows.latent.astype(dtype), rows.k_pe.astype(dtype)
    return dequantize(rows.latent, rows.scale, dtype), rows.k_pe.astype(dtype)
