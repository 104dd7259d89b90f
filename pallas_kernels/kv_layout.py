"""Rows of the two caches: quantisation, writing, and the published byte formats.

Pools are structs of arrays with e4m3 kept as uint8: XLA on CPU up-converts an e4m3 array whole, so
bytes become e4m3 only per gathered tile. The 656-byte latent row and the paged 132-byte index row
exist for interchange only.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped, UInt8

BLOCK = 128
E4M3_MAX = 448.0
_MIN_AMAX = 1e-4
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def e4m3_from_bytes(x: UInt8[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """The bytes read as float8_e4m3fn."""
    return lax.bitcast_convert_type(x, jnp.float8_e4m3fn)


def act_quant(
    x: Float[Array, "*rows D"], *, block: int = BLOCK, ue8m0: bool
) -> tuple[UInt8[Array, "*rows D"], Float[Array, "*rows blocks"]]:
    """Dynamic 1 x block quantisation to e4m3 bytes: scale = max(amax, 1e-4) * (1/448).

    With `ue8m0` the scale is rounded up to a power of two.
    """
    blocks = _blocks(x, block)
    scale = jnp.maximum(_amax(blocks), _MIN_AMAX) * np.float32(1 / E4M3_MAX)
    if ue8m0:
        scale = _ceil_power_of_two(scale)
    return _to_bytes(blocks, scale, x.shape), scale


def quantize_latent(
    x: Float[Array, "*rows C"],
) -> tuple[UInt8[Array, "*rows C"], Float[Array, "*rows tiles"]]:
    """A latent row in 1x128 tiles: scale = amax / 448, not clamped from below, no power of two."""
    blocks = _blocks(x, BLOCK)
    scale = _divide(_amax(blocks), jnp.float32(E4M3_MAX))
    return _to_bytes(blocks, scale, x.shape), scale


def quantize_index(
    x: Float[Array, "*rows D"],
) -> tuple[UInt8[Array, "*rows D"], Float[Array, "*rows"]]:
    """An index key or query: one ue8m0 scale for the whole row."""
    if x.shape[-1] > BLOCK:
        raise ValueError(
            f"index_head_dim={x.shape[-1]} has more than one block of {BLOCK}, but an index "
            f"row has one scale; use index_head_dim <= {BLOCK} or an unquantised index cache."
        )
    values, scale = act_quant(x, block=x.shape[-1], ue8m0=True)
    return values, scale[..., 0]


def dequantize(
    values: UInt8[Array, "*rows C"], scale: Float[Array, "*rows tiles"], dtype: DTypeLike
) -> Float[Array, "*rows C"]:
    """Bytes times the scale of their 1x128 tile; the product is rounded once, to `dtype`."""
    spread = jnp.repeat(scale, BLOCK, axis=-1)[..., : values.shape[-1]]
    return (e4m3_from_bytes(values).astype(jnp.float32) * spread).astype(dtype)


def hadamard(x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """H_D x / sqrt(D), summed in float32 and rounded once to the dtype of x."""
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(
            f"a Hadamard rotation needs a power of two, index_head_dim={dim} is none; "
            "switch index_hadamard off."
        )
    y = jnp.matmul(x.astype(jnp.float32), _hadamard_matrix(dim), precision=lax.Precision.HIGHEST)
    return y.astype(x.dtype)


def write_rows(
    pool: Shaped[Array, " M *row"], values: Shaped[Array, "..."], rows: Int32[Array, "..."]
) -> Shaped[Array, " M *row"]:
    """The pool with `values` at `rows`, in place when donated; row M or below 0 is "not mine"."""
    # An index of -1 would wrap to the last row even with mode="drop".
    rows = jnp.where(rows < 0, pool.shape[0], rows)
    written = pool.at[rows].set(values.astype(pool.dtype), mode="drop")
    # Without the barrier XLA may fuse a one-row write into the gather that reads it: the fusion
    # then reads the old pool, which must be copied to outlive the write.
    return lax.optimization_barrier(written)


def pack_latent_656(
    latent: UInt8[Array, "*rows C"],
    scale: Float[Array, "*rows tiles"],
    k_pe: Float[Array, "*rows R"],
) -> UInt8[Array, "*rows N"]:
    """[C e4m3][ceil(C/128) float32 scales][R bfloat16]: 656 bytes for C = 512, R = 64."""
    parts = latent, _bytes(scale.astype(jnp.float32)), _bytes(k_pe.astype(jnp.bfloat16))
    return jnp.concatenate(parts, axis=-1)


def unpack_latent_656(
    packed: UInt8[Array, "*rows N"], kv_lora_rank: int = 512
) -> tuple[UInt8[Array, "*rows C"], Float[Array, "*rows tiles"], Float[Array, "*rows R"]]:
    """The inverse of `pack_latent_656`: latent bytes, float32 scales, bfloat16 k_pe."""
    scales_end = kv_lora_rank + 4 * -(-kv_lora_rank // BLOCK)
    latent, scale, k_pe = jnp.split(packed, [kv_lora_rank, scales_end], axis=-1)
    return latent, _from_bytes(scale, jnp.float32), _from_bytes(k_pe, jnp.bfloat16)


def pack_index_page(
    values: UInt8[Array, "*pages page_size D"], scale: Float[Array, "*pages page_size"]
) -> UInt8[Array, "*pages N"]:
    """[page_size * D e4m3][page_size float32 scales], not interleaved: 8448 bytes for 64 x 128."""
    flat = values.reshape(*values.shape[:-2], -1)
    return jnp.concatenate([flat, _bytes(scale.astype(jnp.float32))], axis=-1)


def unpack_index_page(
    packed: UInt8[Array, "*pages N"], page_size: int = 64
) -> tuple[UInt8[Array, "*pages page_size D"], Float[Array, "*pages page_size"]]:
    """The inverse of `pack_index_page`."""
    values, scale = jnp.split(packed, [packed.shape[-1] - 4 * page_size], axis=-1)
    return values.reshape(*packed.shape[:-1], page_size, -1), _from_bytes(scale, jnp.float32)


def _hadamard_matrix(dim):
    """H_D / sqrt(D) in float32: entry (i, j) is negative when i & j has an odd number of bits."""
    i = np.arange(dim)
    odd = np.bitwise_count(i[:, None] & i[None, :]) % 2
    return np.where(odd, -1.0, 1.0).astype(np.float32) * np.float32(dim**-0.5)


def _blocks(x, block):
    """Float32 [.., blocks, block], the last block filled up with zeros."""
    count = -(-x.shape[-1] // block)
    widths = [(0, 0)] * (x.ndim - 1) + [(0, count * block - x.shape[-1])]
    return jnp.pad(x.astype(jnp.float32), widths).reshape(*x.shape[:-1], count, block)


def _divide(a, b):
    # XLA turns the division by a broadcast value into a product with its reciprocal, which differs
    # in the last bit (half of the scales, and now and then a byte): behind the barrier the divisor
    # is an array of its own.
    return jnp.divide(*lax.optimization_barrier((a, jnp.broadcast_to(b, a.shape))))


def _amax(blocks):
    # An infinite amax would make inf / inf = NaN of the very values that have to be clamped.
    return jnp.minimum(jnp.max(jnp.abs(blocks), axis=-1), _FLOAT32_MAX)


def _to_bytes(blocks, scale, shape):
    scale = scale[..., None]
    scaled = jnp.where(scale == 0, 0.0, _divide(blocks, jnp.where(scale == 0, 1.0, scale)))
    # Casting |x| >= 465 to e4m3 gives NaN, so clamp first.
    e4m3 = jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    values = lax.bitcast_convert_type(e4m3, jnp.uint8)
    return values.reshape(*shape[:-1], -1)[..., : shape[-1]]


def _ceil_power_of_two(scale):
    """2^ceil(log2 scale) by the exponent bits; exact powers stay."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    up = ((bits & 0x7FFFFF) != 0).astype(jnp.uint32)
    return lax.bitcast_convert_type(((bits >> 23) + up) << 23, jnp.float32)


def _bytes(x):
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw.reshape(*x.shape[:-1], -1)


def _from_bytes(raw, dtype):
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], -1, size), dtype)
