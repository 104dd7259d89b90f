"""Random parameters made on the devices, each rank its own part: a model without a checkpoint.

Means and spreads are those of `testing.checkpoints`, so that activations neither vanish nor blow up
and every expert is chosen now and then; a value outside the checkpoint's own range is zero, as when
loaded.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array
from tqdm import tqdm

from dcp_jax.layers.param import ParamDef
from dcp_jax.model import Model
from dcp_jax.quantization import Blocks
from dcp_jax.testing.checkpoints import random_scale
from dcp_jax.weights.hf import flatten, leaf_shapes, unflatten
from dcp_jax.weights.mapping import Source, sources
from pallas_kernels.kv_layout import E4M3_MAX

# An e4m3 weight's largest value is about this many of its standard deviations.
_DEVIATIONS = 4.0
# The root of the mean square of the 16 values of e2m1.
_E2M1_SPREAD = math.sqrt(68.5 / 8)
# Values of one member of the first axis, from which on they are made one member at a time.
_LARGE = 2**20


def random_params(model: Model, seed: int = 0, *, progress: bool = False) -> dict[str, Any]:
    """Parameters as `load_params` returns them, sharded over the model's mesh.

    One program per kind of leaf; experts are made one after another, to keep temporaries small.
    """
    table = sources(model.cfg, with_mtp=model.with_mtp)
    flat: dict[str, ParamDef] = dict(flatten(model.param_defs))
    shapes = leaf_shapes(table, model.blocks)
    keys = jax.random.split(jax.random.key(seed), len(flat))
    arrays = {}
    with tqdm(total=len(flat), desc="random weights", unit="array", disable=not progress) as bar:
        for key, (name, leaf) in zip(keys, flat.items(), strict=True):
            path, _, part = name.rpartition("/")
            blocks = model.blocks.get(path)
            source = table[name if blocks is None else path]
            kind, centre, spread = _numbers(source, blocks, part)
            sharding = NamedSharding(model.mesh, leaf.spec)
            arrays[name] = _leaf(leaf, shapes[name], kind, sharding, key, centre, spread)
            bar.update()
    return unflatten(arrays)


def _numbers(source: Source, blocks: Blocks | None, part: str) -> tuple[str, float, float]:
    """Kind of a leaf's numbers, their mean and standard deviation."""
    centre, spread = map(float, random_scale(source.names[0], source.tensor_shape))
    if blocks is None:
        return "float", centre, spread
    if part == "weight":
        return blocks.kind, 0.0, E4M3_MAX / _DEVIATIONS
    if blocks.kind == "e4m3":
        return "float", spread * _DEVIATIONS / E4M3_MAX, 0.0
    return "float", 127.0 + round(math.log2(spread / _E2M1_SPREAD)), 0.0


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _leaf(
    leaf: ParamDef,
    shape: tuple[int, ...],
    kind: str,
    sharding: NamedSharding,
    key: Array,
    centre: Array,
    spread: Array,
) -> Array:
    """Random numbers of the padded shape, zero outside `shape`."""

    def numbers(key: Array, size: tuple[int, ...]) -> Array:
        if kind == "mxfp4":
            return jax.random.bits(key, size, jnp.uint8)
        values = centre + spread * jax.random.normal(key, size, jnp.float32)
        if kind == "float":
            return values.astype(leaf.dtype)
        clipped = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(clipped, jnp.uint8)

    count, *member = leaf.shape
    if math.prod(member) < _LARGE or leaf.spec[0] is not None:
        made = numbers(key, leaf.shape)
    else:
        made = lax.map(lambda key: numbers(key, tuple(member)), jax.random.split(key, count))
    for axis, (real, held) in enumerate(zip(shape, leaf.shape, strict=True)):
        if real < held:
            made = jnp.where(lax.broadcasted_iota(jnp.int32, leaf.shape, axis) < real, made, 0)
    return lax.with_sharding_constraint(made.astype(leaf.dtype), sharding)
