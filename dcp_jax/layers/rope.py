"""Rotary position embedding: default and YaRN frequencies, interleaved and half-split layouts.

Rotated channels keep the layout of their input, so that cached keys have the byte order of the
interchange formats (model cards of DeepSeek-V3.2 and GLM-5; YaRN: arXiv 2309.00071).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dcp_jax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """float32 [dim / 2]; YaRN blends interpolated and original frequencies at every length."""
    exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
    base = rope.rope_theta**-exponent
    if rope.rope_type == "default":
        return base.astype(np.float32)

    def correction_dim(rotations: float) -> float:
        wavelength = rope.original_max_position_embeddings / (2 * math.pi * rotations)
        return dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low = max(math.floor(correction_dim(rope.beta_fast)), 0)
    high = min(math.ceil(correction_dim(rope.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return (base / rope.factor * ramp + base * (1 - ramp)).astype(np.float32)


def rope_table(
    rope: RopeConfig, dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """float32 cos and sin of `positions * inverse_frequencies`, times YaRN's attention factor."""
    angle = positions.astype(jnp.float32)[..., None] * inverse_frequencies(rope, dim)
    factor = rope.attention_factor
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(
    x: Float[Array, "B T *H R"],
    table: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
    *,
    interleaved: bool,
) -> Float[Array, "B T *H R"]:
    """Rotate the pairs (2i, 2i+1) if `interleaved`, else (i, i + R/2); float32 inside."""
    cos, sin = (t[..., None, :] if x.ndim == 4 else t for t in table)
    x32 = x.astype(jnp.float32)
    if interleaved:
        pairs = x32.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = jnp.split(x32, 2, axis=-1)
    rotated = a * cos - b * sin, b * cos + a * sin
    y = (
        jnp.stack(rotated, axis=-1).reshape(x.shape)
        if interleaved
        else jnp.concatenate(rotated, -1)
    )
    return y.astype(x.dtype)
