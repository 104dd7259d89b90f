"""Whether a bench fits the devices, from sizes alone, before anything is allocated."""

import math
import os
from collections.abc import Iterable
from typing import Any

import jax

from dcp_jax.bench.cases import Case, Shape
from dcp_jax.cache.pool import CacheSpec
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import MAX_ROWS
from dcp_jax.layers.param import ParamDef
from dcp_jax.mesh import AXES
from dcp_jax.plan import Layout, StepShape, workspace
from dcp_jax.policy import PrefillPath

GIB = 2**30
USABLE = 0.95  # of what the device has: the runtime keeps some


def device_bytes(mesh: jax.sharding.Mesh) -> int:
    """Memory of one device: what JAX may take of a GPU, its share of the host's on a CPU."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    limits = [s["bytes_limit"] for s in stats if s and "bytes_limit" in s]
    if limits:
        return min(limits)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // mesh.size


def free_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """What is left on the fullest device beside weights and caches; None if it does not say."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    left = [s["bytes_limit"] - s["bytes_in_use"] for s in stats if s and "bytes_limit" in s]
    return min(left, default=None)


def param_bytes(defs: Any, mesh: jax.sharding.Mesh) -> int:
    """Bytes of parameters on one device."""
    leaves = jax.tree.leaves(defs, is_leaf=lambda d: isinstance(d, ParamDef))
    total = 0
    for leaf in leaves:
        axes = [axis for part in leaf.spec if part for axis in _names(part)]
        shards = math.prod(mesh.shape[axis] for axis in axes)
        total += math.prod(leaf.shape) * leaf.dtype.itemsize // shards
    return total


def _names(part: str | tuple[str, ...]) -> tuple[str, ...]:
    return (part,) if part in AXES else tuple(part)


def step_bytes(
    cfg: ModelConfig,
    layout: Layout,
    shapes: Iterable[Shape],
    variants: Iterable[tuple[PrefillPath, int | None]],
) -> int:
    """Temporary memory of the largest step, as `plan` reckons it."""
    variants = list(variants)
    return max(
        workspace(
            cfg,
            layout,
            StepShape(
                *(shape.rows, shape.tokens, shape.pages, path),
                gather_chunk_tokens=chunk or StepShape.gather_chunk_tokens,
            ),
        ).peak
        for shape in shapes
        for path, chunk in variants
    )


def check_rows(cases: Iterable[Case], rows: int) -> None:
    """Refuse caches whose `rows`, of all layers on one device, int32 cannot number.

    Raises:
        ValueError: with their number.
    """
    if rows > MAX_ROWS:
        raise ValueError(
            f"{_largest(cases)} are {rows} cache rows a device, more than int32 numbers: lower "
            "prefix, extend, batch or layers, or raise dcp_size."
        )


def _largest(cases: Iterable[Case]) -> str:
    case = max(cases, key=lambda case: case.batch * case.keys)
    return f"{case.batch} rows of {case.prefix} + {case.extend} tokens"


def check_fits(
    cases: Iterable[Case], weights: int, spec: CacheSpec, step: int, available: int
) -> None:
    """Refuse what no device can hold.

    Args:
        cases: batches; the largest is named.
        weights: bytes on one device.
        spec: sizes of the caches.
        step: temporary bytes of the largest step.
        available: bytes of one device.

    Raises:
        ValueError: with all the sizes.
    """
    caches = sum(spec.rank_bytes().values())
    needed = weights + caches + step
    if needed > USABLE * available:
        raise ValueError(
            f"{_largest(cases)} need about {needed / GIB:.1f} GiB a device (weights "
            f"{weights / GIB:.1f}, caches {caches / GIB:.1f}, a step {step / GIB:.1f}) and it has "
            f"{available / GIB:.1f}: lower prefix, extend, batch or layers, or raise tp "
            "and dcp_size."
        )
