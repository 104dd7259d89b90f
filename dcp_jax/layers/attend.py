"""Absorbed attention over a selection: the own rows of every head, or gathered rows of own heads.

Both take queries in latent space [B, T, H, kv_lora_rank + rope] and return [B, T, H, kv_lora_rank].
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from dcp_jax.cache.pool import CacheSpec
from dcp_jax.dcp.collectives import MERGE_HEADS, gather_heads
from dcp_jax.dcp.step import DcpStep, StepOptions
from dcp_jax.layers.gathered import chunks_of, fold_chunks, gather_chunk
from dcp_jax.layers.indexer import Selection
from pallas_kernels.lse_merge import merge_two
from pallas_kernels.sparse_mla import LatentPool, sparse_mla


def attend_owned(
    q: Float[Array, "B T H D"],
    pool: LatentPool,
    base: int,
    selection: Selection,
    *,
    scale: float,
    spec: CacheSpec,
    step: DcpStep,
    opts: StepOptions,
) -> Float[Array, "B T H C"]:
    """Heads of the whole group over the own rows, then the merge that hands each rank its heads.

    1. all-gather q over `dcp`        n*H*(C+R)*itemsize bytes to each other rank
    2. sparse MLA over the owned rows
    3. LSE merge, scattering heads    n*H*(C*itemsize + 4)
    """
    del step
    assert selection.rows is not None, "a selection of the OWNED path has rows"
    rank_dim = spec.kv_lora_rank
    everyone = gather_heads(q)
    out, lse = sparse_mla(
        everyone[..., :rank_dim],
        everyone[..., rank_dim:],
        pool,
        selection.rows,
        selection.counts,
        scale=scale,
        base_row=base,
        implementation=opts.kernels,
    )
    return MERGE_HEADS[opts.dcp_comm](out, lse, q.dtype)


def attend_gathered(
    q: Float[Array, "B T H D"],
    pool: LatentPool,
    base: int,
    selection: Selection,
    *,
    scale: float,
    spec: CacheSpec,
    step: DcpStep,
    opts: StepOptions,
) -> Float[Array, "B T H C"]:
    """Own heads over every rank's rows, gathered chunk by chunk; partials merge in float32.

    Per chunk of S keys over all ranks and rows: all-gather latents, k_pe (and scales), S/W each.
    """
    rank_dim = spec.kv_lora_rank
    chunks = chunks_of(step, spec.page_size, opts.gather_chunk_tokens)
    width, batch = chunks.width, q.shape[0]
    entry = jnp.arange(selection.index.shape[-1], dtype=jnp.int32)
    real = entry < selection.counts[..., None]
    first_row = (jnp.arange(batch, dtype=jnp.int32) * width)[:, None, None]

    def attend_chunk(number) -> tuple[Array, Array]:
        start = number * width
        # Positions ascend, so a chunk's part of the selection is one run of it.
        skipped = jnp.sum(real & (selection.index < start), -1, dtype=jnp.int32)
        within = jnp.sum(real & (selection.index < start + width), -1, dtype=jnp.int32) - skipped
        places = jnp.minimum(skipped[..., None] + entry, entry.shape[0] - 1)
        positions = jnp.take_along_axis(selection.index, places, axis=-1)
        return sparse_mla(
            q[..., :rank_dim],
            q[..., rank_dim:],
            LatentPool(*gather_chunk(tuple(pool), base, chunks, number, "latent")),
            first_row + positions - start,
            within,
            scale=scale,
            implementation=opts.kernels,
        )

    out, _ = fold_chunks(chunks, attend_chunk, lambda left, right: merge_two(*left, *right))
    return out.astype(q.dtype)
