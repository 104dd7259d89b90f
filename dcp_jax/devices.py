"""Enough devices for a mesh: on CPU they can be made, before the backend starts."""

import contextlib
import os

import jax


def ensure_devices(count: int) -> None:
    """Make `count` devices visible if the platform is CPU and its backend has not started.

    Raises:
        ValueError: fewer devices are visible and none can be made.
    """
    by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not by_flag and jax.config.jax_num_cpu_devices < count:
        # Concerns the CPU backend only; refused once a backend runs, which then stays as it is.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    visible = jax.devices()
    if len(visible) < count:
        how = (
            "set jax.config.update('jax_num_cpu_devices', N) before the first use of JAX"
            if visible[0].platform == "cpu"
            else "make more of them visible"
        )
        raise ValueError(
            f"tp={count} needs {count} devices and {len(visible)} are visible "
            f"({visible[0].platform}): lower tp, or {how}."
        )
