"""Normalisation; statistics are float32 whatever the activations are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The indexer's key norm has this epsilon in every released model, whatever rms_norm_eps says.
INDEX_NORM_EPS = 1e-6


def rms_norm(
    x: Float[Array, "*N D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*N D"]:
    """`weight * x / rms(x)`, cast to x's dtype before the weight, as Hugging Face does."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * normed.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*N D"],
    weight: Float[Array, " D"],
    bias: Float[Array, " D"],
    eps: float = INDEX_NORM_EPS,
) -> Float[Array, "*N D"]:
    """LayerNorm with an affine transform, computed in float32 and cast to x's dtype last."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
