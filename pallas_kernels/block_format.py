"""Weights whose blocks of values share a scale, as bytes: e4m3 by 128 x 128, and MXFP4 by 32.

    e4m3    one byte a value                          weight = value * scale, scale float32
    mxfp4   two e2m1 values a byte, low half first    weight = value * 2^(scale - 127), scale uint8

A value times its scale is exact in float32 for both (a power of two, or 4 significant bits times
24, rounded once). Bytes stay uint8 until a tile of them is multiplied: XLA on CPU widens an e4m3
array whole.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.kv_layout import e4m3_from_bytes

# Values in one byte, by kind.
VALUES_PER_BYTE = {"e4m3": 1, "mxfp4": 2}

# The 16 values of e2m1, by their bits.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def values_from_bytes(weight: UInt8[Array, "*N D"], kind: str) -> Float[Array, "*N K"]:
    """The float32 values behind the bytes, without their scales."""
    if kind == "e4m3":
        return e4m3_from_bytes(weight).astype(jnp.float32)
    halves = jnp.stack([weight & 15, weight >> 4], axis=-1)
    return jnp.asarray(E2M1)[halves.reshape(*weight.shape[:-1], -1)]


def scales_as_float32(scale: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """Scales as factors; bytes are e8m0 (2^-127, a subnormal, may become 0)."""
    if scale.dtype == jnp.uint8:
        return lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu).astype(jnp.float32)
    return scale


def dequantize_blocks(
    weight: UInt8[Array, "..."],
    scale: Shaped[Array, "..."],
    blocks: tuple[int, ...],
    dtype: DTypeLike,
    kind: str = "e4m3",
) -> Float[Array, "..."]:
    """The weights in `dtype`, rounded once.

    Args:
        weight: bytes, any rank.
        scale: of the same rank: scale i along an axis holds for values i * block .. + block - 1.
        blocks: values that share a scale, for each axis.
        dtype: of the result.
        kind: "e4m3" or "mxfp4".
    """
    values = values_from_bytes(weight, kind)
    factor = scales_as_float32(scale)
    for axis, block in enumerate(blocks):
        if block > 1:
            factor = jnp.repeat(factor, block, axis=axis)
            factor = lax.slice_in_dim(factor, 0, values.shape[axis], axis=axis)
    return (values * factor).astype(dtype)
