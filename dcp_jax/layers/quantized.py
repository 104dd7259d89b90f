"""Weights held in blocks: a parameter of two leaves, and what a product makes of it.

A module's weight `w` is read as `w[...]`, be it an array or held in blocks: the latter gives a
`BlockWeight`, which `layers/linear.py` multiplies by.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from dcp_jax.layers.param import param
from dcp_jax.quantization import Blocks
from pallas_kernels.block_format import dequantize_blocks
from pallas_kernels.block_gemm import block_gemm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeight:
    """A weight as bytes and scales.

    Attributes:
        data: the bytes.
        scale: of each block.
        blocks: kind and sizes of the blocks.
        activations: what `block_gemm` makes of the other operand.
    """

    data: UInt8[Array, "..."]
    scale: Shaped[Array, "..."]
    blocks: Blocks = field(metadata={"static": True})
    activations: str | None = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return (*self.data.shape[:-1], self.data.shape[-1] * self.blocks.values_per_byte)

    def __getitem__(self, index: Any) -> "BlockWeight":
        """Member `index` (an int, or traced) of the leading axis, which no block spans."""
        rest = Blocks(self.blocks.kind, self.blocks.sizes[1:])
        return BlockWeight(self.data[index], self.scale[index], rest, self.activations)

    def dequantized(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """All of it at once."""
        sizes, kind = self.blocks.sizes, self.blocks.kind
        return dequantize_blocks(self.data, self.scale, sizes, dtype, kind)


Weight = Float[Array, "..."] | BlockWeight


class BlockParam(nnx.Module):
    """A parameter held in blocks: the leaves `weight` and `scale`, sharded alike."""

    def __init__(self, dense: nnx.Param, blocks: Blocks, activations: str | None):
        """`dense`: the parameter whose values these are."""
        axes, shape = dense.get_metadata("axes"), tuple(dense.get_value().shape)
        self.weight = param(blocks.byte_shape(shape), jnp.uint8, axes)
        self.scale = param(blocks.scale_shape(shape), jnp.dtype(blocks.scale_dtype), axes)
        self.blocks = blocks
        self.activations = activations

    def __getitem__(self, index: Any) -> BlockWeight:
        """`[...]`: the weight, as of an `nnx.Param`."""
        assert index is Ellipsis, "take the whole weight, and its members from there"
        return BlockWeight(self.weight[...], self.scale[...], self.blocks, self.activations)


def hold_in_blocks(
    module: nnx.Module, path: str, blocks: Blocks, activations: str | None = None
) -> None:
    """Put a `BlockParam` in place of the parameter at `path` ("layers/0/attn/o_proj")."""
    *parents, name = path.split("/")
    for key in parents:
        module = module[key] if isinstance(module, nnx.Dict) else getattr(module, key)
    setattr(module, name, BlockParam(getattr(module, name), blocks, activations))


def matmul_axes(spec: str) -> int | None:
    """How many leading axes of w `jnp.einsum(spec, x, w)` keeps, if it is one matrix product.

    That is a sum over the last axes of both, after which w's other axes follow x's.
    """
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    kept = "".join(axis for axis in right if axis not in left)
    summed = right[len(kept) :]
    one = right.startswith(kept) and left.endswith(summed) and summed
    return len(kept) if one and out == left.removesuffix(summed) + kept else None


def block_matmul(x: Float[Array, "..."], w: BlockWeight, lead: int) -> Float[Array, "..."]:
    """Float32 product over all axes of w but the first `lead`, which become the last of the result.

    Blocks never span two members of an axis but the last kept and the last summed one, so merging
    axes leaves blocks.
    """
    rows, width = math.prod(w.shape[:lead]), math.prod(w.shape[lead:])
    y = block_gemm(
        x.reshape(-1, width),
        w.data.reshape(rows, -1),
        w.scale.reshape(math.prod(w.scale.shape[:lead]), -1),
        block=(w.blocks.sizes[lead - 1], w.blocks.sizes[-1]),
        kind=w.blocks.kind,
        activations=w.activations,
    )
    return y.reshape(*x.shape[: x.ndim + lead - len(w.shape)], *w.shape[:lead])
