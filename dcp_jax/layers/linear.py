"""Matrix products: operands in the activations' dtype, sums in float32.

A weight is an array, or held in blocks. By one in blocks, a matrix product goes tile by tile
(`pallas_kernels/block_gemm.py`), and only the absorbed up-projections, small matrices per head, are
dequantised whole, as the released implementations do.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dcp_jax.layers.quantized import BlockWeight, Weight, block_matmul, matmul_axes


def einsum(spec: str, x: Float[Array, "..."], w: Weight) -> Float[Array, "..."]:
    """`jnp.einsum` accumulated in float32 and returned in x's dtype."""
    return einsum32(spec, x, w).astype(x.dtype)


def einsum32(spec: str, x: Float[Array, "..."], w: Weight) -> Float[Array, "..."]:
    """`jnp.einsum` with float32 sums; narrower operands are multiplied as they are, exactly.

    XLA on CPU has no kernel for some products of bfloat16 (it fails when they run), so there the
    operands are widened first: the same products, the same sums.
    """
    if isinstance(w, BlockWeight):
        lead = matmul_axes(spec)
        if lead is not None:
            return block_matmul(x, w, lead)
        w = w.dequantized(x.dtype)

    def product(x, w):
        return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32)

    if x.dtype == jnp.float32:
        return product(x, w)

    def widened(x, w):
        return product(x.astype(jnp.float32), w.astype(jnp.float32))

    return jax.lax.platform_dependent(x, w, cpu=widened, default=product)


def linear(x: Float[Array, "*N D"], w: Float[Array, "O D"] | BlockWeight) -> Float[Array, "*N O"]:
    """`x @ w.T`: weights are stored [out, in], as in a checkpoint."""
    return einsum("...d,od->...o", x, w)


def linear32(x: Float[Array, "*N D"], w: Float[Array, "O D"]) -> Float[Array, "*N O"]:
    """`linear` with the float32 sums returned as they are: router, head weights, logits."""
    return einsum32("...d,od->...o", x, w.astype(x.dtype))
