"""JAX inference of GLM-5 and DeepSeek-V3.2 (sparse attention) under decode context parallelism.

The public names are imported on first use: `import dcp_jax` neither imports jax nor starts a
backend, so that the number of CPU devices or the memory fraction can still be set.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "AsyncLLM": "dcp_jax.async_llm",
    "Batch": "dcp_jax.dcp.step",
    "LLM": "dcp_jax.llm",
    "Model": "dcp_jax.model",
    "ModelConfig": "dcp_jax.config",
    "PrefillPath": "dcp_jax.policy",
    "PrefillPolicy": "dcp_jax.policy",
    "RequestOutput": "dcp_jax.engine.outputs",
    "SamplingParams": "dcp_jax.engine.sampling_params",
    "StepOptions": "dcp_jax.dcp.step",
    "forward": "dcp_jax.functional",
    "init_cache": "dcp_jax.functional",
    "load_params": "dcp_jax.functional",
    "make_mesh": "dcp_jax.mesh",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
