"""JAX inference of GLM-5 and DeepSeek-V3.2 (sparse attention) under decode context parallelism.

The public names are imported on first use: `import dcp_jax` neither imports jax nor starts a
backend, so that the number of CPU devices or the memory fraction can still be set.
"""

from dcp_jax.lazy import lazy_names

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
__getattr__, __dir__ = lazy_names(globals(), _HOME)
