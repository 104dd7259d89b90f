"""Parameters with logical axes, and how module trees cross `jit` and `shard_map`.

A module is built once, abstractly, with its *global* shapes; inside `shard_map` the same graph is
filled with a rank's local arrays. So a forward reads sizes from its arrays, never from the config's
global head count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from dcp_jax.mesh import partition_spec


@dataclass(frozen=True)
class ParamDef:
    """Global (padded) shape, dtype in memory and sharding of one parameter."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


def param(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...] = ()) -> nnx.Param:
    """A parameter whose axis i shards as `axes[i]` says (missing or None: replicated)."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def abstract(build: Callable[[], nnx.Module]) -> tuple[Any, nnx.State]:
    """Graph and abstract state of the module that `build()` returns; no array is allocated."""
    return nnx.split(nnx.eval_shape(build))


def param_defs(state: nnx.State) -> dict:
    """Nested dict of `ParamDef`, keyed like the parameters themselves."""
    defs: dict = {}
    for path, variable in nnx.to_flat_state(state):
        node = defs
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        value = variable.get_value()
        axes = variable.get_metadata("axes")
        node[str(path[-1])] = ParamDef(tuple(value.shape), value.dtype, partition_spec(axes))
    return defs


def bind(graph: Any, state: nnx.State, params: dict) -> Any:
    """The module with `params` (a plain nested dict, any shapes) in place of its abstract state."""
    flat = nnx.to_flat_state(state)

    def value_at(path):
        node = params
        for key in path:
            node = node[str(key)]
        return node

    leaves = [variable.replace(value_at(path)) for path, variable in flat]
    return nnx.merge(
        graph, nnx.from_flat_state(list(zip((p for p, _ in flat), leaves, strict=True)))
    )


def specs(defs: dict) -> dict:
    """The sharding of every parameter, as a nested dict of `PartitionSpec`."""
    return jax.tree.map(lambda d: d.spec, defs, is_leaf=lambda d: isinstance(d, ParamDef))
