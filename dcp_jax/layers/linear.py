"""Matrix products: operands in the activations' dtype, sums in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def einsum(spec: str, x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
    """`jnp.einsum` accumulated in float32 and returned in x's dtype."""
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def linear(x: Float[Array, "*N D"], w: Float[Array, "O D"]) -> Float[Array, "*N O"]:
    """`x @ w.T`: weights are stored [out, in], as in a checkpoint."""
    return einsum("...d,od->...o", x, w)


def linear32(x: Float[Array, "*N D"], w: Float[Array, "O D"]) -> Float[Array, "*N O"]:
    """`linear` with the float32 sums returned as they are: router, head weights, logits."""
    return jnp.einsum("...d,od->...o", x, w.astype(x.dtype), preferred_element_type=jnp.float32)
