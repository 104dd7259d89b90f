"""Checks of the options of an engine before a backend starts: every problem in one message."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dcp_jax.dcp.layout import padded
from dcp_jax.dcp.step import DCP_COMMS, INDEX_CACHES
from dcp_jax.mesh import check_sizes
from dcp_jax.policy import PrefillPolicy

KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8": "fp8_e4m3",
}
# Grows with the kernels: an implementation that no op has yet is refused here, not while tracing.
KERNELS = ("xla",)
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Resolved:
    """Options with their aliases and "auto" resolved; `kv_dtype` None follows the model's dtype."""

    kv_dtype: str | None
    dcp_comm: Literal["a2a", "ag_rs"]


def _is_count(value) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and int(value) >= 1


def option_problems(
    *,
    dtype,
    kv_cache_dtype,
    dcp_comm,
    index_cache,
    kernels,
    tp,
    dcp_size,
    max_model_len,
    max_running_requests,
    max_queued_requests,
    chunked_prefill_size,
    decode_steps,
    enable_prefix_caching,
    page_size,
    mem_fraction_static,
    max_total_tokens,
    compilation_cache_dir,
    prefill,
) -> list[str]:
    """Everything that is wrong with the options of `LLM`: the value given, the reason, the fix."""
    problems = []

    def choice(name, value, allowed):
        if not any(value == one for one in allowed):
            problems.append(f"{name}={value!r} is not supported: use one of {sorted(allowed)}")

    def count(name, value, optional=False):
        if not (_is_count(value) or (optional and value is None)):
            problems.append(f"{name}={value!r} is not a count: give a whole number of at least 1")

    choice("dtype", dtype, DTYPES)
    choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    choice("dcp_comm", dcp_comm, ("auto", *DCP_COMMS))
    choice("index_cache", index_cache, INDEX_CACHES)
    if kernels is not None:
        choice("kernels", kernels, ("auto", *KERNELS))
    count("tp", tp)
    count("dcp_size", dcp_size)
    count("max_model_len", max_model_len, optional=True)
    count("max_running_requests", max_running_requests)
    count("max_queued_requests", max_queued_requests, optional=True)
    count("chunked_prefill_size", chunked_prefill_size)
    count("decode_steps", decode_steps)
    count("page_size", page_size)
    count("max_total_tokens", max_total_tokens, optional=True)
    if not isinstance(enable_prefix_caching, bool):
        problems.append(
            f"enable_prefix_caching={enable_prefix_caching!r} is neither True nor False: give one"
        )
    if not isinstance(compilation_cache_dir, str | Path | None):
        problems.append(f"compilation_cache_dir={compilation_cache_dir!r} is no path: give one")
    if _is_count(tp) and _is_count(dcp_size):
        try:
            check_sizes(tp, dcp_size)
        except ValueError as error:
            problems.append(str(error).removesuffix("."))
    fraction = mem_fraction_static
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        problems.append(
            f"mem_fraction_static={mem_fraction_static!r} is not a share of the memory: give a "
            "number above 0 and at most 1"
        )
    if dcp_size == 1 and dcp_comm != "auto":
        problems.append(
            f"dcp_comm={dcp_comm!r} has no effect with dcp_size=1, where nothing is exchanged: "
            "leave it at 'auto', or raise dcp_size"
        )
    if dcp_size == 1 and index_cache == "replicated":
        problems.append(
            "index_cache='replicated' has no effect with dcp_size=1, where the one rank has every "
            "key: leave it at 'sharded', or raise dcp_size"
        )
    if not isinstance(prefill, PrefillPolicy):
        problems.append(f"prefill_policy={prefill!r} is not a PrefillPolicy: give one")
    elif dcp_size == 1 and prefill.force is not None and prefill.force.gathers:
        problems.append(
            f"prefill.force={prefill.force.value!r} has no effect with dcp_size=1, where the one "
            "rank owns every row: leave it out, or raise dcp_size"
        )
    if not problems and max_model_len and max_total_tokens:
        fits = padded(max_total_tokens, page_size * dcp_size)
        if max_model_len > fits:
            problems.append(
                f"max_model_len={max_model_len} does not fit a pool of {fits} tokens "
                f"(max_total_tokens={max_total_tokens} in pages of {page_size * dcp_size}): give "
                f"at most {fits}, or raise max_total_tokens"
            )
    return problems


def check_options(**options: Any) -> Resolved:
    """Resolve the options of `LLM`, or say everything that is wrong with them.

    Args:
        **options: the arguments of `option_problems`.

    Raises:
        ValueError: one line per problem.
    """
    problems = option_problems(**options)
    if problems:
        raise ValueError(
            problems[0] + "."
            if len(problems) == 1
            else "\n".join(
                [f"{len(problems)} options cannot be used:", *(f"- {p}." for p in problems)]
            )
        )
    dcp_comm = options["dcp_comm"]
    return Resolved(
        KV_CACHE_DTYPES[options["kv_cache_dtype"]], "a2a" if dcp_comm == "auto" else dcp_comm
    )
