"""Products with block-quantised weights: y[n, o] = sum_k x[n, k] w[o, k], sums in float32.

Two ways, which differ in their numbers:

* activations as they are: a tile of rows is dequantised to x's dtype and multiplied, then the next;
* dynamic activations (DeepSeek-V3, arXiv 2412.19437, section 3.3): x is quantised to e4m3 in blocks
  of 1 x 128; e4m3 products are summed within a block of k, and the sums added with both scales.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.block_format import VALUES_PER_BYTE, dequantize_blocks
from pallas_kernels.dispatch import pick
from pallas_kernels.kv_layout import BLOCK, act_quant, e4m3_from_bytes

# Values of a weight that are dequantised at a time: 8 MB in bfloat16.
TILE = 2**22


def block_gemm(
    x: Float[Array, "N K"],
    weight: UInt8[Array, "O D"],
    scale: Shaped[Array, "ob kb"],
    *,
    block: tuple[int, int] = (BLOCK, BLOCK),
    kind: str = "e4m3",
    activations: str | None = None,
    implementation: str | None = None,
    tile: int = TILE,
) -> Float[Array, "N O"]:
    """`x @ w.T` in float32.

    Args:
        x: float32 or bfloat16.
        weight: bytes of w [O, K] (D = K, or K/2 for mxfp4).
        scale: of each block of w; float32, or e8m0 bytes for mxfp4.
        block: rows and columns that share a scale; the last ones may be ragged.
        kind: "e4m3" or "mxfp4".
        activations: None multiplies by x as it is; "float32" or "ue8m0" quantises it dynamically,
            with scales of that kind (e4m3 weights only).
        implementation: see `dispatch`.
        tile: values of w that are dequantised at a time, at least one block of rows.

    Raises:
        ValueError: `activations` with weights that are not e4m3.
    """
    if activations is not None and kind != "e4m3":
        raise ValueError(
            f"activations={activations!r} multiplies e4m3 by e4m3, and the weights are {kind}: use "
            "activations=None."
        )
    table = {"xla": _block_gemm_xla}
    return pick("block_gemm", implementation, table)(
        x, weight, scale, block=block, kind=kind, activations=activations, tile=tile
    )


def _block_gemm_xla(x, weight, scale, *, block, kind, activations, tile):
    with jax.named_scope("block_gemm"):
        if activations is not None:
            return _dynamic(x, weight, scale, block, activations == "ue8m0")
        return _by_tiles(x, weight, scale, block, kind, tile)


def _by_tiles(x, weight, scale, block, kind, tile):
    """A loop over tiles of rows, and the rest of them."""
    total, columns = weight.shape[0], weight.shape[1] * VALUES_PER_BYTE[kind]
    blocks = max(1, tile // (columns * block[0]))
    rows = blocks * block[0]

    def multiply(weight, scale):
        return _product(x, dequantize_blocks(weight, scale, block, x.dtype, kind))

    if total <= rows:
        return multiply(weight, scale)

    def one(number):
        return multiply(
            lax.dynamic_slice_in_dim(weight, number * rows, rows),
            lax.dynamic_slice_in_dim(scale, number * blocks, blocks),
        )

    count = total // rows
    parts = lax.map(one, jnp.arange(count))  # [count, N, rows]
    whole = jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], -1)
    if total == count * rows:
        return whole
    rest = multiply(weight[count * rows :], scale[count * blocks :])
    return jnp.concatenate([whole, rest], axis=1)


def _dynamic(x, weight, scale, block, ue8m0):
    """A loop over blocks of k, and the ragged one; both operands stay e4m3 up to the product."""
    rows, width = block
    total, columns = weight.shape
    values, factors = act_quant(x, ue8m0=ue8m0)

    def part(values, factors, weight, scale):
        sums = _product(e4m3_from_bytes(values), e4m3_from_bytes(weight))
        return sums * factors[:, None] * jnp.repeat(scale, rows)[:total]

    def add(sums, number):
        cut = number * width
        return sums + part(
            lax.dynamic_slice_in_dim(values, cut, width, axis=1),
            factors[:, cut // BLOCK],
            lax.dynamic_slice_in_dim(weight, cut, width, axis=1),
            scale[:, number],
        ), None

    count = columns // width
    sums = jnp.zeros((x.shape[0], total), jnp.float32)
    if count:
        sums, _ = lax.scan(add, sums, jnp.arange(count))
    cut = count * width
    if cut == columns:
        return sums
    return sums + part(values[:, cut:], factors[:, -1], weight[:, cut:], scale[:, -1])


def _product(x, w):
    """`x @ w.T` summed in float32; XLA on CPU lacks products of narrow floats: widened there."""

    def product(x, w):
        return jnp.einsum("nk,ok->no", x, w, preferred_element_type=jnp.float32)

    def widened(x, w):
        return product(x.astype(jnp.float32), w.astype(jnp.float32))

    if x.dtype == jnp.float32:
        return product(x, w)
    return lax.platform_dependent(x, w, cpu=widened, default=product)
