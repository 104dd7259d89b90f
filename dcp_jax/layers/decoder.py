"""One decoder layer: attention and feed-forward, each behind a norm and added to the residual."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dcp_jax.cache.pool import CacheSpec, KVCache
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.step import DcpStep, StepOptions
from dcp_jax.layers.indexer import Selection
from dcp_jax.layers.mla import Attention
from dcp_jax.layers.moe import MoE, SwiGLU
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.param import param
from dcp_jax.layers.sizes import Sizes


class LayerResult(NamedTuple):
    """Hidden states, caches, the selection for the next layer, experts of a sparse layer."""

    x: Float[Array, "B T d"]
    cache: KVCache
    selection: Selection | None
    experts: Int[Array, "B T k"] | None


class DecoderLayer(nnx.Module):
    """Parameters of one layer, `sizes` in all."""

    def __init__(
        self, cfg: ModelConfig, sizes: Sizes, dtype: jnp.dtype, *, full: bool, sparse: bool
    ):
        """`full`: has an indexer of its own; `sparse`: mixture of experts."""
        self.cfg = cfg
        self.input_layernorm = param((cfg.hidden_size,), dtype)
        self.post_attention_layernorm = param((cfg.hidden_size,), dtype)
        self.attn = Attention(cfg, sizes.heads, dtype, full)
        if sparse:
            self.mlp = MoE(cfg, sizes.moe_intermediate, sizes.shared_intermediate, dtype)
        else:
            self.mlp = SwiGLU(cfg.hidden_size, sizes.intermediate, dtype)

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
    ) -> LayerResult:
        """Apply the layer; the arguments are those of `Attention`."""
        eps = self.cfg.rms_norm_eps
        attended, cache, selection = self.attn(
            rms_norm(x, self.input_layernorm[...], eps),
            cache,
            selection,
            layer=layer,
            ordinal=ordinal,
            rope=rope,
            spec=spec,
            step=step,
            opts=opts,
        )
        x = x + attended
        y, experts = self.mlp(rms_norm(x, self.post_attention_layernorm[...], eps))
        return LayerResult(x + y, cache, selection, experts)
