"""Small parameters of all layers as few arrays: a launch costs the host time for each that it gets.

Norms, biases and the like are half of a model's arrays and next to none of its bytes. Those of one
shape, dtype and sharding become one array with an axis in front; inside a launch each is a slice of
it again, which XLA fuses into whatever reads it.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dcp_jax.cache.pool import Leaf

# Bytes of a small array on one device.
SMALL = 2**16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Parameters as a launch takes them.

    Attributes:
        large: arrays as they are, by their keys in the nested dict joined with dots.
        small: arrays [n, ...] of n small ones each.
        rows: for each of `small`, the keys of its rows; static.
    """

    large: dict[str, Leaf]
    small: tuple[Leaf, ...]
    rows: tuple[tuple[str, ...], ...] = field(metadata={"static": True})


def stack(params: dict, *, small: int = SMALL) -> Stacked:
    """Parameters with those of at most `small` bytes per device stacked.

    Args:
        params: nested dict of arrays, all on one mesh.
        small: bytes.
    """
    large, groups = {}, defaultdict(dict)
    for key, array in _flat(params):
        size = array.addressable_shards[0].data.nbytes
        if size <= small and isinstance(array.sharding, NamedSharding):
            groups[array.shape, array.dtype, array.sharding][key] = array
        else:
            large[key] = array
    for kind, arrays in list(groups.items()):
        if len(arrays) == 1:  # nothing is gained
            large |= groups.pop(kind)
    return Stacked(
        large,
        tuple(_stacked(list(arrays.values()), kind[-1]) for kind, arrays in groups.items()),
        tuple(tuple(arrays) for arrays in groups.values()),
    )


def unstack(params: Stacked | dict) -> dict:
    """The nested dict of parameters; one that is not stacked is returned as it is."""
    if not isinstance(params, Stacked):
        return params
    flat = dict(params.large)
    for rows, array in zip(params.rows, params.small, strict=True):
        flat |= {key: array[i] for i, key in enumerate(rows)}
    nested: dict = {}
    for key, array in flat.items():
        *path, name = key.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[name] = array
    return nested


def _flat(params: dict, prefix: str = ""):
    for name, value in params.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _stacked(arrays: list[jax.Array], sharding: NamedSharding) -> jax.Array:
    """Stacked on the host, shard by shard: nothing is compiled for it."""
    first = arrays[0]
    spec = PartitionSpec(None, *sharding.spec)
    shards = [
        jax.device_put(
            np.stack([np.asarray(a.addressable_shards[i].data) for a in arrays]), shard.device
        )
        for i, shard in enumerate(first.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(
        (len(arrays), *first.shape), NamedSharding(sharding.mesh, spec), shards
    )
