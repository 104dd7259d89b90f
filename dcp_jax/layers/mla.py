"""Multi-head latent attention over the selected rows, in the absorbed form (arXiv 2405.04434).

Only the latent (`kv_c`) and one rotated key (`k_pe`) per token are cached. The key up-projection is
applied to the query, the value up-projection to the output, so attention runs in latent space:

    s[t, u] = (q_nope W_uk . kv_c[u] + q_pe . k_pe[u]) * softmax_scale
    o[t] = W_uv sum_u softmax(s)[t, u] kv_c[u]
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dcp_jax.cache.pool import CacheSpec, KVCache, write_latent
from dcp_jax.config import ModelConfig
from dcp_jax.dcp import layout
from dcp_jax.dcp.collectives import MERGE_HEADS, axis_size, gather_heads, gather_keys, tp_sum
from dcp_jax.dcp.step import DcpStep, StepOptions
from dcp_jax.layers.indexer import Indexer, Selection, index_and_select, pool_rows_in_order
from dcp_jax.layers.linear import einsum, linear
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.param import param
from dcp_jax.layers.rope import apply_rope
from dcp_jax.mesh import DCP
from dcp_jax.policy import PrefillPath
from pallas_kernels.lse_merge import merge_two
from pallas_kernels.sparse_mla import LatentPool, sparse_mla


class Attention(nnx.Module):
    """One layer's attention; heads shard over the tensor-parallel group."""

    def __init__(self, cfg: ModelConfig, heads: int, dtype: jnp.dtype, has_indexer: bool):
        """`heads` is the padded global head count; a padded head has zero weights."""
        self.cfg = cfg
        hidden, nope, rope = cfg.hidden_size, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
        rank, value = cfg.kv_lora_rank, cfg.v_head_dim
        self.q_a_proj = param((cfg.q_lora_rank, hidden), dtype)
        self.kv_a_proj = param((rank + rope, hidden), dtype)
        self.q_a_layernorm = param((cfg.q_lora_rank,), dtype)
        self.kv_a_layernorm = param((rank,), dtype)
        self.q_b_proj = param((heads, nope + rope, cfg.q_lora_rank), dtype, ("heads",))
        self.w_uk = param((heads, nope, rank), dtype, ("heads",))
        self.w_uv = param((heads, value, rank), dtype, ("heads",))
        self.o_proj = param((hidden, heads, value), dtype, (None, "heads"))
        if has_indexer:
            self.indexer = Indexer(cfg, dtype)

    def __call__(
        self,
        x: Float[Array, "B T d"],
        cache: KVCache,
        selection: Selection | None,
        *,
        layer: int,
        ordinal: int,
        rope: tuple,
        spec: CacheSpec,
        step: DcpStep,
        opts: StepOptions,
    ) -> tuple[Float[Array, "B T d"], KVCache, Selection]:
        """Write this step's rows, select if this is a full layer, attend, project.

        Args:
            x: layer input after input_layernorm.
            cache: both caches.
            selection: of the last full layer; replaced if this is one.
            layer: region of the latent cache.
            ordinal: region of the index cache, if this layer has an indexer.
            rope: cos and sin of the step's positions.
            spec: sizes of the caches.
            step: this rank's indices.
            opts: static options.
        """
        cfg = self.cfg
        q_latent = rms_norm(
            linear(x, self.q_a_proj[...]), self.q_a_layernorm[...], cfg.latent_norm_eps
        )
        kv = linear(x, self.kv_a_proj[...])
        kv_c = rms_norm(kv[..., : cfg.kv_lora_rank], self.kv_a_layernorm[...], cfg.latent_norm_eps)
        k_pe = apply_rope(kv[..., cfg.kv_lora_rank :], rope, interleaved=True)
        rows = layout.layer_row(step.write_rows, layer, spec.rows, spec.layers)
        cache = write_latent(cache, rows, kv_c, k_pe)

        if hasattr(self, "indexer"):
            selection, cache = index_and_select(
                self.indexer,
                x,
                q_latent,
                cache,
                ordinal,
                rope=rope,
                index_topk_size=cfg.index_topk,
                spec=spec,
                step=step,
                opts=opts,
            )
        assert selection is not None, "the first layer is a full one (ModelConfig refuses others)"

        q = einsum("btq,hnq->bthn", q_latent, self.q_b_proj[...])
        q_pe = apply_rope(q[..., cfg.qk_nope_head_dim :], rope, interleaved=True)
        q_absorbed = einsum("bthn,hnc->bthc", q[..., : cfg.qk_nope_head_dim], self.w_uk[...])
        gathered = opts.path is PrefillPath.GATHERED and axis_size(DCP) > 1
        attend = _attend_gathered if gathered else _attend_owned
        attended = attend(
            jnp.concatenate([q_absorbed, q_pe], axis=-1),
            cache.latent_pool,
            layer * spec.rows,
            selection,
            scale=cfg.softmax_scale,
            spec=spec,
            step=step,
            opts=opts,
        )
        value = einsum("bthc,hvc->bthv", attended, self.w_uv[...])
        out = einsum("bthv,dhv->btd", value, self.o_proj[...])
        return tp_sum(out), cache, selection


def _attend_owned(q, pool, base, selection, *, scale, spec, step, opts) -> Float[Array, "B T H C"]:
    """Heads of the whole group over the own rows, then the merge that hands each rank its heads.

    1. all-gather q over `dcp`        n*H*(C+R)*itemsize bytes to each other rank
    2. sparse MLA over the owned rows
    3. LSE merge, scattering heads    n*H*(C*itemsize + 4)
    """
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


def _attend_gathered(
    q, pool, base, selection, *, scale, spec, step, opts
) -> Float[Array, "B T H C"]:
    """Own heads over every rank's rows, gathered chunk by chunk; partials merge in float32.

    Per chunk of S keys over all ranks: all-gather latents, k_pe (and scales), S/W rows each.
    """
    rank_dim = spec.kv_lora_rank
    ranks = axis_size(DCP)
    local_rows = pool_rows_in_order(step.page_table, spec.page_size)
    batch, local = local_rows.shape
    chunk = min(max(opts.gather_chunk_tokens // ranks, 1), local)
    chunks = -(-local // chunk)
    local_rows = jnp.pad(local_rows, ((0, 0), (0, chunks * chunk - local)))
    entry = jnp.arange(selection.index.shape[-1], dtype=jnp.int32)
    real = entry < selection.counts[..., None]
    width = chunk * ranks
    first_row = (jnp.arange(batch, dtype=jnp.int32) * width)[:, None, None]

    def attend_chunk(number) -> tuple[Array, Array]:
        rows = base + jax.lax.dynamic_slice_in_dim(local_rows, number * chunk, chunk, axis=1)
        gathered = jax.tree.map(lambda rows_of: gather_keys(rows_of[rows], "latent"), pool)
        flat = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), gathered)
        start = number * width
        skipped = jnp.sum(real & (selection.index < start), -1, dtype=jnp.int32)
        within = jnp.sum(real & (selection.index < start + width), -1, dtype=jnp.int32) - skipped
        places = jnp.minimum(skipped[..., None] + entry, entry.shape[0] - 1)
        positions = jnp.take_along_axis(selection.index, places, axis=-1)
        return sparse_mla(
            q[..., :rank_dim],
            q[..., rank_dim:],
            LatentPool(*flat),
            first_row + positions - start,
            within,
            scale=scale,
            implementation=opts.kernels,
        )

    if chunks == 1:
        return attend_chunk(0)[0].astype(q.dtype)
    shape = (*q.shape[:-1], rank_dim)
    empty = jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
    merged, _ = jax.lax.scan(
        lambda carry, number: (merge_two(*carry, *attend_chunk(number)), None),
        empty,
        jnp.arange(chunks, dtype=jnp.int32),
    )
    return merged[0].astype(q.dtype)
