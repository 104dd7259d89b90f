"""The NextN (multi-token prediction) layer: guesses token i+2 from hidden state i and token i+1.

    z[i] = eh_proj [ rms(embed(t[i+1])) ; rms(h[i]) ]
    m[i] = rms(layer(z)[i]),  logits = lm_head m[i]

with h[i] the main model's output after its final norm (DeepSeek-V3, arXiv 2412.19437, section 2.2;
order of the halves as in the released checkpoints). It always has an indexer of its own.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dcp_jax.cache.pool import KVCache
from dcp_jax.config import ModelConfig
from dcp_jax.layers.decoder import DecoderLayer, LayerResult
from dcp_jax.layers.linear import linear
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.param import param
from dcp_jax.layers.sizes import Sizes


class NextN(nnx.Module):
    """Parameters of the layer; embedding and output head are the main model's."""

    def __init__(self, cfg: ModelConfig, sizes: Sizes, dtype: jnp.dtype):
        """`sizes` are global and padded."""
        self.eps = cfg.rms_norm_eps
        hidden = cfg.hidden_size
        self.enorm = param((hidden,), dtype)
        self.hnorm = param((hidden,), dtype)
        self.eh_proj = param((hidden, 2 * hidden), dtype)
        self.norm = param((hidden,), dtype)
        self.layer = DecoderLayer(cfg, sizes, dtype, full=True, sparse=True)

    def __call__(
        self,
        embedded: Float[Array, "B T d"],
        hidden: Float[Array, "B T d"],
        cache: KVCache,
        **step,
    ) -> LayerResult:
        """Result whose `x` is m, ready for the output head and for the next draft step."""
        halves = (
            rms_norm(embedded, self.enorm[...], self.eps),
            rms_norm(hidden, self.hnorm[...], self.eps),
        )
        z = linear(jnp.concatenate(halves, axis=-1).astype(embedded.dtype), self.eh_proj[...])
        result = self.layer(z, cache, None, **step)
        return result._replace(x=rms_norm(result.x, self.norm[...], self.eps))
