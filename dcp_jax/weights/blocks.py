"""Quantised tensors on the host, in numpy: a box of a parameter from the bytes and scales of it.

What comes out does not depend on how a parameter is cut: a box that begins inside a block takes the
scales that cover it, and a float tensor is quantised by the blocks of the *tensor*, whichever part
of them the box has.
"""

import math

import ml_dtypes
import numpy as np

from dcp_jax.quantization import E4M3, MXFP4, BlockFormat
from dcp_jax.weights.mapping import Cuts, Source
from dcp_jax.weights.safetensors_file import Checkpoint
from pallas_kernels.block_format import E2M1
from pallas_kernels.kv_layout import E4M3_MAX

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
# Both values of a byte, the low half first.
_E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)
_E8M0_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)

# The stored dtype of a quantised tensor decides how it is read.
FORMATS = {"F8_E4M3": E4M3, "U8": MXFP4}
SCALE_DTYPES = {"e4m3": ("F32", "BF16", "F8_E8M0"), "mxfp4": ("U8", "F8_E8M0")}


def quantize(values: np.ndarray, *, ue8m0: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Float32 [N, K] as e4m3 bytes [N, K] and float32 scales [ceil(N/128), ceil(K/128)].

    scale = amax / 448 of its block (1 where all is zero), with `ue8m0` rounded up to a power of
    two.
    """
    rows, columns = values.shape
    grid = [-(-n // size) for n, size in zip(values.shape, E4M3.block, strict=True)]
    padded = np.zeros([n * size for n, size in zip(grid, E4M3.block, strict=True)], np.float32)
    padded[:rows, :columns] = values
    blocks = padded.reshape(grid[0], E4M3.block[0], grid[1], E4M3.block[1])
    scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(E4M3_MAX)
    scale[scale == 0] = 1
    if ue8m0:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    np.divide(blocks, scale[:, None, :, None], out=blocks)
    # Casting |x| >= 465 gives NaN, and rounding of the quotient may pass 448.
    np.clip(padded, -E4M3_MAX, E4M3_MAX, out=padded)
    return padded[:rows, :columns].astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale


def quantize_mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 [N, K] as packed e2m1 [N, K/2] and e8m0 bytes [N, K/32] (OCP MX 1.0, section 6.3).

    The scale is 2^(floor(log2 amax) - 2): 4 is the largest power of two of e2m1. Values round to
    the nearest of e2m1, ties to even, and saturate.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    rows, columns = values.shape
    if columns % MXFP4.block[1]:
        raise ValueError(f"MXFP4 needs rows of whole groups of 32 values, not of {columns}.")
    groups = values.reshape(rows, -1, MXFP4.block[1])
    exponent = np.frexp(np.abs(groups).max(axis=-1))[1] - 3
    scale = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    scaled = np.clip(groups / _E8M0_VALUES[scale][..., None], -6, 6)
    bits = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(rows, -1)
    return (bits[:, ::2] & 15) | (bits[:, 1::2] << 4), scale


def dequantize(
    data: np.ndarray, scale: np.ndarray, blocks: tuple[int, ...], kind: str = "e4m3"
) -> np.ndarray:
    """Float32 values of bytes and scales of the same rank, as `dequantize_blocks` has them."""
    if kind == "mxfp4":
        values = _E2M1_PAIRS[data].reshape(*data.shape[:-1], -1)
        scale = _E8M0_VALUES[scale]
    else:
        values = _E4M3_VALUES[data]
    for axis, block in enumerate(blocks):
        if block > 1:
            scale = np.repeat(scale, block, axis=axis)
    values *= scale[tuple(slice(0, n) for n in values.shape)]
    return values


def read_values(source: Source, checkpoint: Checkpoint, box: Cuts, out: np.ndarray) -> None:
    """Copies `parameter[box]` into `out`, in out's dtype; quantised tensors are dequantised.

    Args:
        source: of the parameter.
        checkpoint: has every tensor of it, with scales where it is quantised.
        box: one slice with start and stop per axis, inside the parameter's shape.
        out: array of the box's shape.
    """
    for place, name, cuts in source.pieces(box):
        stored = FORMATS.get(checkpoint[name].dtype)
        if stored is None:
            out[place] = checkpoint.read(name, cuts, source.view_shape)
            continue
        blocks = _view_blocks(source, stored)
        # From the border of a block on, so that its scales stand for whole blocks.
        aligned = tuple(
            slice(cut.start // size * size, cut.stop)
            for cut, size in zip(cuts, blocks, strict=True)
        )
        data, scale = _read_stored(source, checkpoint, name, aligned, stored)
        inside = tuple(
            slice(cut.start - whole.start, None) for cut, whole in zip(cuts, aligned, strict=True)
        )
        out[place] = dequantize(data, scale, blocks, stored.kind)[inside]


def read_blocks(
    source: Source, checkpoint: Checkpoint, box: Cuts, data: np.ndarray, scale: np.ndarray
) -> None:
    """Copies bytes and scales of `parameter[box]`; float tensors are quantised to e4m3.

    Args:
        source: of the parameter.
        checkpoint: has every tensor of it, all of one format.
        box: one slice with start and stop per axis; the starts are multiples of the blocks.
        data: uint8, of the box's shape (its last axis packed).
        scale: one per block.

    Raises:
        ValueError: a scale that is no positive number: the file is corrupt.
    """
    for place, name, cuts in source.pieces(box):
        stored = FORMATS.get(checkpoint[name].dtype)
        if stored is None:
            data[place], scale[place] = _convert(source, checkpoint, name, cuts)
        else:
            data[place], scale[place] = _read_stored(source, checkpoint, name, cuts, stored)


def _view_blocks(source: Source, stored: BlockFormat) -> tuple[int, ...]:
    return source.blocks(stored.block)[len(source.stack_shape) :]


def _read_stored(
    source: Source, checkpoint: Checkpoint, name: str, cuts: Cuts, stored: BlockFormat
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales of a part of one quantised tensor; `cuts` begin at block borders."""
    packed = source.packed(stored.values_per_byte)
    *outer, last = cuts
    per_byte = stored.values_per_byte
    in_bytes = (*outer, slice(last.start // per_byte, last.stop // per_byte))
    data = checkpoint.read(name, in_bytes, packed.view_shape).view(np.uint8)
    rows, columns, shape = _scale_index(source, cuts, stored)
    scale_name = stored.scale_of(name)
    first = slice(rows.min(), rows.max() + 1)
    grid = checkpoint.read(scale_name, (first,))[np.ix_(rows - first.start, columns)]
    if stored.kind == "mxfp4":
        scale = grid.view(np.uint8)
        sound = scale != 255
    else:
        scale = grid.astype(np.float32)
        sound = np.isfinite(scale) & (scale > 0)
    if not sound.all():
        raise ValueError(
            f"{checkpoint.file_of(scale_name)} is corrupt: tensor {scale_name} has scales that are "
            "no positive numbers; download it again"
        )
    return data, scale.reshape(shape)


def _convert(
    source: Source, checkpoint: Checkpoint, name: str, cuts: Cuts
) -> tuple[np.ndarray, np.ndarray]:
    """The same of a float tensor, quantised by its own 128 x 128 blocks."""
    rows, columns, shape = _scale_index(source, cuts, E4M3)
    # The part as a region of the stored matrix, grown to whole blocks; its inner axes come whole.
    region, inside, sizes, inner = [], [], [], []
    axis = 0
    for size, merged in zip(E4M3.block, source.merged, strict=True):
        within = source.view_shape[axis + 1 : axis + merged]
        first, last = (n * math.prod(within) for n in (cuts[axis].start, cuts[axis].stop))
        grown = first // size * size
        region.append(slice(grown, -(-last // size) * size))
        inside.append(slice(first - grown, last - grown))
        sizes += [cuts[axis].stop - cuts[axis].start, *within]
        inner += [slice(None), *cuts[axis + 1 : axis + merged]]
        axis += merged
    data, grid = quantize(checkpoint.read(name, tuple(region)).astype(np.float32))
    part = data[tuple(inside)].reshape(sizes)[tuple(inner)]
    top, left = (cut.start // size for cut, size in zip(region, E4M3.block, strict=True))
    return part, grid[np.ix_(rows - top, columns - left)].reshape(shape)


def _scale_index(
    source: Source, cuts: Cuts, stored: BlockFormat
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Rows and columns of a tensor's scales for a part of its view, and the scales' shape there."""
    blocks = _view_blocks(source, stored)
    found: list[np.ndarray] = []
    shape: list[int] = []
    axis = 0
    for size, merged in zip(stored.block, source.merged, strict=True):
        at = np.zeros(1, np.int64)
        for _ in range(merged):
            step = blocks[axis]
            numbers = np.arange(cuts[axis].start // step, -(-cuts[axis].stop // step))
            at = (at[:, None] * source.view_shape[axis] + numbers * step).reshape(-1)
            shape.append(len(numbers))
            axis += 1
        found.append(at // size)
    return found[0], found[1], tuple(shape)
