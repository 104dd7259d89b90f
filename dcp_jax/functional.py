"""The model without an engine: pure functions over parameters, caches and batches.

    model = dj.Model(cfg, dj.make_mesh(tp=2, dcp_size=2), jnp.dtype("float32"))
    params = dj.load_params(directory, model)
    spec, cache = dj.init_cache(model, tokens=256, page_size=16)
    out, cache = dj.forward(model, params, cache, batch, spec=spec, opts=dj.StepOptions(16))

Gradients flow through float caches to every parameter but the indexer's, whose selection is a
constant of the step (as in the reference). `PrefillPath.GATHERED` and `dcp_comm="ag_rs"` are
differentiable in every dtype, `dcp_comm="a2a"` in float32.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from dcp_jax.cache import pool
from dcp_jax.cache.pool import CacheSpec, KVCache
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.dcp.step import INDEX_CACHES, Batch, StepOptions
from dcp_jax.mesh import DCP
from dcp_jax.model import Model, StepOutput
from dcp_jax.quantization import E4M3, FP8_CONFIG, block_format
from dcp_jax.weights.hf import flatten, load_hf
from dcp_jax.weights.orbax import is_orbax, load_orbax


def load_params(directory: str | Path, model: Model, *, progress: bool = False) -> dict:
    """Parameters of a Hugging Face or Orbax directory, sharded over the model's mesh.

    Raises:
        ValueError: what is missing, unexpected or misshapen, all in one message.
    """
    if is_orbax(directory):
        return load_orbax(directory, model.param_defs, model.mesh)
    return load_hf(
        directory,
        model.cfg,
        model.param_defs,
        model.mesh,
        convert=ModelConfig.from_hf(directory).quantization is None,
        progress=progress,
    )


def with_quantization(
    cfg: ModelConfig,
    quantization: str | None,
    activation_scheme: str = "none",
    dtype: str = "bfloat16",
) -> ModelConfig:
    """The config that `--quantization` and `--activation-scheme` ask for.

    Args:
        cfg: of the checkpoint.
        quantization: "fp8" holds what the checkpoint has unquantised in e4m3 blocks; None and
            "none" change nothing.
        activation_scheme: "dynamic" needs e4m3 weights.
        dtype: that the model computes in.

    Raises:
        ValueError: the checkpoint is quantised otherwise, or its weights are not e4m3, or the model
            holds every weight in float32.
    """
    if dtype == "float32" and (quantization == "fp8" or activation_scheme == "dynamic"):
        raise ValueError(
            f"quantization={quantization!r} and activation_scheme={activation_scheme!r} have no "
            "effect on a float32 model, which holds every weight in float32: leave them out, or "
            "use dtype='bfloat16'."
        )
    stored = block_format(cfg.quantization)
    if quantization == "fp8" and stored is None:
        cfg, stored = replace(cfg, quantization=FP8_CONFIG), E4M3
    if quantization == "fp8" and stored != E4M3:
        raise ValueError(
            "quantization='fp8' is not what the checkpoint has, which is MXFP4: leave it out."
        )
    if activation_scheme == "dynamic" and stored != E4M3:
        raise ValueError(
            "activation_scheme='dynamic' multiplies e4m3 by e4m3, and the checkpoint's weights are "
            f"{'MXFP4' if stored else cfg.dtype}: leave it out"
            + ("." if stored else ", or hold the weights in e4m3 with quantization='fp8'.")
        )
    return cfg


def check_arrays(params: dict, defs: dict) -> None:
    """Refuse arrays that are not those of a model.

    Raises:
        ValueError: the first few whose name, shape or dtype differs.
    """
    given, wanted = dict(flatten(params)), dict(flatten(defs))
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is unknown" for name in given if name not in wanted]
    for name in wanted.keys() & given.keys():
        array, defined = given[name], wanted[name]
        if tuple(array.shape) != defined.shape or array.dtype != defined.dtype:
            problems.append(
                f"{name} is {array.dtype}{list(array.shape)}, not "
                f"{jnp.dtype(defined.dtype)}{list(defined.shape)}"
            )
    if problems:
        raise ValueError(
            f"{len(problems)} params do not fit the model on this mesh and dtype: "
            f"{'; '.join(sorted(problems)[:5])}; load them for it, with load_params."
        )


def init_cache(
    model: Model,
    *,
    tokens: int,
    page_size: int = 64,
    kv_dtype: Literal["float32", "bfloat16", "fp8_e4m3"] | None = None,
    index_cache: Literal["sharded", "replicated"] = "sharded",
) -> tuple[CacheSpec, KVCache]:
    """Empty caches for at least `tokens` tokens over all ranks, and their sizes.

    Args:
        model: whose layers they hold.
        tokens: rounded up to whole pages of `page_size * dcp_size` tokens.
        page_size: rows of a page on each rank.
        kv_dtype: default: the model's own dtype.
        index_cache: indexer keys sharded over the ranks, or whole on each.

    Raises:
        ValueError: sizes that no pool can have.
    """
    if index_cache not in INDEX_CACHES:
        raise ValueError(
            f"index_cache={index_cache!r} is not supported: use one of {INDEX_CACHES}."
        )
    dcp_size = model.mesh.shape[DCP]
    spec = CacheSpec.of(
        model.cfg,
        with_mtp=model.with_mtp,
        pages=pages_needed(tokens, page_size, dcp_size),
        page_size=page_size,
        dcp_size=dcp_size,
        kv_dtype=kv_dtype or str(model.dtype),
        index_replicated=index_cache == "replicated",
    )
    return spec, pool.init_cache(spec, model.mesh)


def forward(
    model: Model,
    params: dict,
    cache: KVCache,
    batch: Batch,
    *,
    spec: CacheSpec,
    opts: StepOptions,
) -> tuple[StepOutput, KVCache]:
    """One step: writes the batch's tokens into the caches and returns what follows each row.

    `model`, `spec` and `opts` are static; jit the rest, and donate the cache. A row whose result is
    not `certified` has to be run again with `candidates="full"` (`engine.Runner` does so).

    Args:
        model: configuration, mesh and dtype.
        params: nested dict of arrays as `model.param_defs` describes it.
        cache: from `init_cache`, or of the step before.
        batch: int32 tokens [B, T], starts [B], lengths [B], page_table [B, P].
        spec: sizes of the caches.
        opts: path, exchange, and what to return.
    """
    return model.forward(params, cache, batch, spec=spec, opts=opts)
