"""The device mesh (`dp`, `model`, `dcp`) and which mesh axes each logical axis shards over.

`tp` is the total tensor parallelism, as in SGLang and vLLM: `tp = size(model) * size(dcp)`. Weights
shard over (`model`, `dcp`) together, model-major: shard `m * W + r` sits on device (m, r), so that
gathering heads over `dcp` yields contiguous heads. Tokens of both caches shard over `dcp` alone.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

DP, MODEL, DCP = "dp", "model", "dcp"
AXES = (DP, MODEL, DCP)
TP = (MODEL, DCP)

# The one table from what a parameter's axis means to the mesh axes that it shards over.
MESH_AXES = {"heads": TP, "mlp": TP, "vocab": TP}


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Mesh axes of a parameter whose logical axes are `axes` (None: not sharded)."""
    return PartitionSpec(*(None if axis is None else MESH_AXES[axis] for axis in axes))


def check_sizes(tp: int, dcp_size: int, dp: int = 1) -> None:
    """Refuse a layout that no mesh can have.

    Raises:
        ValueError: a size below 1, or `dcp_size` does not divide `tp`.
    """
    for name, size in (("tp", tp), ("dcp_size", dcp_size), ("dp", dp)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} is not a size: give a whole number of at least 1.")
    if tp % dcp_size:
        valid = [w for w in range(1, tp + 1) if tp % w == 0]
        raise ValueError(
            f"dcp_size={dcp_size} does not divide tp={tp}: the ranks of one DCP group are ranks of "
            f"one tensor-parallel group. Use one of {valid}, or change tp."
        )


def make_mesh(tp: int = 1, dcp_size: int = 1, dp: int = 1, devices: list | None = None) -> Mesh:
    """A mesh of `dp * tp` devices with axes (`dp`, `model`, `dcp`), `dcp` innermost.

    Raises:
        ValueError: sizes that do not fit each other, or fewer devices than they need.
    """
    check_sizes(tp, dcp_size, dp)
    devices = jax.devices() if devices is None else devices
    needed = dp * tp
    if len(devices) < needed:
        raise ValueError(
            f"tp={tp} with dp={dp} needs {needed} devices but {len(devices)} are visible "
            f"({devices[0].platform}): lower tp, or make more devices visible (on CPU: "
            "jax.config.update('jax_num_cpu_devices', N) before the first use of JAX)."
        )
    grid = np.asarray(devices[:needed]).reshape(dp, tp // dcp_size, dcp_size)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def tp_size(mesh: Mesh) -> int:
    """Total tensor parallelism of `mesh`."""
    return mesh.shape[MODEL] * mesh.shape[DCP]
