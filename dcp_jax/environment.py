"""What a bug report should say about an installation: versions, devices, links, settings."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

PACKAGES = (
    *("dcp-jax", "jax", "jaxlib", "flax", "numpy", "ml-dtypes", "orbax-checkpoint", "safetensors"),
    *("tokenizers", "tyro", "jax-triton", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("jax-rocm7-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
# Nothing outside these is read: an environment may hold secrets.
VARIABLES = ("JAX_", "XLA_", "NCCL_", "RCCL_", "CUDA_VISIBLE_", "HIP_VISIBLE_", "TF_GPU_")
SETTINGS = (
    *("jax_platforms", "jax_num_cpu_devices", "jax_default_matmul_precision", "jax_enable_x64"),
    *("jax_compilation_cache_dir", "jax_debug_nans", "jax_disable_jit"),
)
LINKS = {"gpu": (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo"))}


def environment() -> dict[str, Any]:
    """Sections of names and values; starts the backend."""
    import jax

    devices = jax.devices()
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "processes": jax.process_count(),
        },
        "devices": [
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            }
            for device in devices
        ],
        "links": links(devices[0].platform),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
        "settings": {name: getattr(jax.config, name, None) for name in SETTINGS},
    }


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def links(platform_name: str) -> str:
    """How the devices are connected, by the vendor's tool, or why that is not known."""
    if platform_name == "cpu":
        return "CPU devices share the memory of the host"
    for command in LINKS.get(platform_name, ()):
        if shutil.which(command[0]) is None:
            continue
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"not known: {' '.join(command)}: {error}"
        return result.stdout.strip()
    return "not known: no tool of the vendor on the PATH"
