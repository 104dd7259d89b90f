"""Multi-head latent attention (arXiv 2405.04434) over the selected rows, in the absorbed form.

Only the latent (`kv_c`) and one rotated key (`k_pe`) per token are cached. The key up-projection is
applied to the query, the value up-projection to the output, so attention runs in latent space:

    s[t, u] = (q_nope W_uk . kv_c[u] + q_pe . k_pe[u]) * softmax_scale
    o[t] = W_uv sum_u softmax(s)[t, u] kv_c[u]

Short rows may be attended densely instead, in the un-absorbed form (`layers/dense.py`).
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dcp_jax.cache.pool import CacheSpec, KVCache, write_latent
from dcp_jax.config import ModelConfig
from dcp_jax.dcp import layout
from dcp_jax.dcp.collectives import axis_size, tp_sum
from dcp_jax.dcp.step import DcpStep, StepOptions
from dcp_jax.layers.attend import attend_gathered, attend_owned
from dcp_jax.layers.dense import attend_dense
from dcp_jax.layers.indexer import Indexer, Selection, select, write_keys
from dcp_jax.layers.linear import einsum, linear
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.param import param
from dcp_jax.layers.rope import apply_rope
from dcp_jax.mesh import DCP
from dcp_jax.policy import PrefillPath


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
    ) -> tuple[Float[Array, "B T d"], KVCache, Selection | None]:
        """Write this step's rows, select if this is a full layer, attend, project.

        Args:
            x: layer input after input_layernorm.
            cache: both caches.
            selection: of the last full layer; replaced if this is one. None if nothing is selected.
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

        dense = opts.path is PrefillPath.MHA_ONE_SHOT
        if hasattr(self, "indexer"):
            shared = {"rope": rope, "spec": spec, "step": step, "opts": opts}
            cache = write_keys(self.indexer, x, cache, ordinal, **shared)
            if not dense:
                selection = select(
                    self.indexer,
                    x,
                    q_latent,
                    cache,
                    ordinal,
                    index_topk_size=cfg.index_topk,
                    **shared,
                )

        q = einsum("btq,hnq->bthn", q_latent, self.q_b_proj[...])
        q_nope = q[..., : cfg.qk_nope_head_dim]
        q_pe = apply_rope(q[..., cfg.qk_nope_head_dim :], rope, interleaved=True)
        sizes = {"scale": cfg.softmax_scale, "spec": spec, "step": step, "opts": opts}
        base = layer * spec.rows
        if dense:
            value = attend_dense(
                jnp.concatenate([q_nope, q_pe], axis=-1),
                kv_c,
                k_pe,
                cache,
                base,
                self.w_uk[...],
                self.w_uv[...],
                **sizes,
            )
        else:
            assert selection is not None, "the first layer is full (ModelConfig refuses others)"
            q_absorbed = einsum("bthn,hnc->bthc", q_nope, self.w_uk[...])
            gathered = opts.path.gathers and axis_size(DCP) > 1
            attended = (attend_gathered if gathered else attend_owned)(
                jnp.concatenate([q_absorbed, q_pe], axis=-1),
                cache.latent_pool,
                base,
                selection,
                **sizes,
            )
            value = einsum("bthc,hvc->bthv", attended, self.w_uv[...])
        out = einsum("bthv,dhv->btd", value, self.o_proj[...])
        return tp_sum(out), cache, selection
