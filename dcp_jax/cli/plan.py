"""Commands that need no checkpoint and start no backend: `dcp-jax plan` and `check-config`."""

import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import EnumChoicesFromValues, Positional

from dcp_jax.cli.engine import aliases
from dcp_jax.config import ModelConfig
from dcp_jax.configs import NAMES, named_config
from dcp_jax.named import NAMES as IN_THE_BOX
from dcp_jax.named import find_model
from dcp_jax.plan import (
    RESERVE,
    Calibration,
    Deployment,
    Layout,
    check,
    compare,
    device,
)
from dcp_jax.plan.devices import GB
from dcp_jax.policy import PrefillPolicy

KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}


def load_config(model: str) -> ModelConfig:
    """The config of a released model by its name, or of a checkpoint directory."""
    if model in IN_THE_BOX:
        return ModelConfig.from_hf(find_model(model))
    if model in NAMES or not Path(model).exists():
        return ModelConfig.from_hf(named_config(model))
    return ModelConfig.from_hf(model)


def _print_json(value: Any) -> None:
    """A dataclass as JSON; infinity, which JSON lacks, as null, and an enum as its value."""

    def finite(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: finite(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [finite(inner) for inner in item]
        if isinstance(item, enum.Enum):
            return item.value
        return None if isinstance(item, float) and math.isinf(item) else item

    print(json.dumps(finite(dataclasses.asdict(value))))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Compare dcp_size 1, 2, 4, 8 and attention data parallelism: what fits, and how fast."""

    model: Positional[str]
    """deepseek-v3.2, glm-5 or glm-5.2, or a checkpoint directory."""
    device: str = "H200"
    """H200, MI355X, H100, B200, B300 or MI300X."""
    tp: Annotated[int, aliases("--tp-size", "--tensor-parallel-size", "-tp")] = 8
    """Devices in all."""
    context_length: Annotated[int, aliases("--context", "--max-model-len")] = 131072
    """Tokens of each request."""
    concurrency: int = 8
    """Requests decoded together whose time per output token is shown."""
    max_running_requests: Annotated[int, aliases("--max-num-seqs", "--max-batch-size")] = 512
    """Requests at capacity, at most."""
    tpot_ms: float | None = None
    """Recommend the best throughput with at most this time per output token."""
    weights: Literal["fp8", "bfloat16", "float32"] = "fp8"
    """What matrices are held in."""
    kv_cache_dtype: Literal["fp8_e4m3", "fp8", "bf16", "float32"] = "fp8_e4m3"
    """Of both caches."""
    index_cache: Literal["sharded", "replicated"] = "sharded"
    """Indexer keys sharded over the ranks, or whole on each of them."""
    dcp_comm: Annotated[Literal["a2a", "ag_rs"], aliases("--dcp-comm-backend")] = "a2a"
    """Collectives of the merge of partial attention outputs."""
    replicate_q_proj: Annotated[bool, aliases("--dcp-replicate-q-proj")] = False
    """Each rank projects the queries of its whole group instead of gathering them."""
    with_mtp: bool = False
    """Hold the MTP layer's weights and caches too."""
    page_size: Annotated[int, aliases("--block-size")] = 64
    """Rows of a page on each rank."""
    mem_fraction_static: Annotated[
        float, aliases("--gpu-memory-utilization", "--cache-max-entry-count")
    ] = 0.9
    """Share of device memory for weights, caches and reserve."""
    reserve_gb: float = RESERVE / GB
    """Of it, neither weights nor caches."""
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    """Measured constants of the step model."""
    plot: Path | None = None
    """Also plot time and throughput against the context into this file."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self, console: Console) -> None:
        """Compute, print, plot."""
        from dcp_jax.plan.tables import comparison_table, plot_comparison, verdicts

        base = Deployment(
            load_config(self.model),
            Layout(
                tp=self.tp,
                page_size=self.page_size,
                weights=self.weights,
                kv_dtype=KV_DTYPES.get(self.kv_cache_dtype, self.kv_cache_dtype),  # type: ignore
                index_replicated=self.index_cache == "replicated",
                dcp_comm=self.dcp_comm,
                with_mtp=self.with_mtp,
                replicate_q_proj=self.replicate_q_proj,
            ),
            device(self.device),
            mem_fraction_static=self.mem_fraction_static,
            reserve_bytes=round(self.reserve_gb * GB),
            max_running_requests=self.max_running_requests,
        )
        plan = compare(
            base,
            context=self.context_length,
            concurrency=self.concurrency,
            limit=None if self.tpot_ms is None else self.tpot_ms / 1e3,
            calibration=self.calibration,
        )
        if self.plot is not None:
            plot_comparison(base, plan, self.calibration, self.plot)
        if self.json:
            _print_json(plan)
            return
        weights = plan.rows[0].weights / GB
        console.print(
            f"{self.model} on {self.tp} x {plan.device.name}: {self.weights} weights "
            f"({weights:.1f} GB a rank), {base.layout.kv_dtype} caches, index "
            f"{self.index_cache}; floors, from {plan.device.source}",
            highlight=False,
        )
        console.print(comparison_table(plan, self.max_running_requests))
        for sentence in verdicts(plan):
            console.print(sentence, highlight=False)


@dataclasses.dataclass(frozen=True)
class CheckConfig:
    """Show what a launch with these options holds, needs and exchanges, or why it cannot work."""

    model: Positional[str]
    """deepseek-v3.2, glm-5 or glm-5.2, or a checkpoint directory."""
    device: str | None = None
    """H200, MI355X, H100, B200, B300 or MI300X; without one, give --max-total-tokens."""
    tp: Annotated[int, aliases("--tp-size", "--tensor-parallel-size", "-tp")] = 1
    """Devices that the weights are spread over, in all."""
    dcp_size: Annotated[int, aliases("--decode-context-parallel-size", "--dcp", "-dcp")] = 1
    """How many of them share the tokens of the caches; divides tp."""
    weights: Annotated[Literal["auto", "fp8", "bfloat16", "float32"], aliases("--dtype")] = "auto"
    """What matrices are held in; auto: as the checkpoint has them."""
    kv_cache_dtype: Literal["auto", "float32", "bf16", "fp8_e4m3", "fp8"] = "auto"
    """Of both caches; auto: float32 with float32 weights, else bf16."""
    dcp_comm: Annotated[Literal["auto", "a2a", "ag_rs"], aliases("--dcp-comm-backend")] = "auto"
    """Collectives of the merge of partial attention outputs."""
    index_cache: Literal["sharded", "replicated"] = "sharded"
    """Indexer keys sharded over the ranks, or whole on each of them."""
    max_model_len: Annotated[int | None, aliases("--context-length", "--session-len")] = None
    """Tokens of a prompt and its continuation together."""
    max_running_requests: Annotated[int, aliases("--max-num-seqs", "--max-batch-size")] = 64
    """Sequences decoded together."""
    chunked_prefill_size: Annotated[
        int, aliases("--max-num-batched-tokens", "--max-prefill-token-num")
    ] = 8192
    """Tokens of a prompt per step."""
    page_size: Annotated[int, aliases("--block-size")] = 64
    """Rows of a page on each rank."""
    mem_fraction_static: Annotated[
        float, aliases("--gpu-memory-utilization", "--cache-max-entry-count")
    ] = 0.9
    """Share of device memory for weights, caches and reserve; steps have the rest."""
    reserve_gb: float = RESERVE / GB
    """Of it, neither weights nor caches."""
    max_total_tokens: int | None = None
    """Size of the pool over all ranks; default: what fits."""
    prefill: Annotated[PrefillPolicy, EnumChoicesFromValues] = dataclasses.field(
        default_factory=PrefillPolicy
    )
    """Thresholds of the prefill paths."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self, console: Console) -> None:
        """Check, print."""
        from dcp_jax.plan.tables import check_tables

        cfg = load_config(self.model)
        weights = self.weights
        if weights == "auto":
            weights = "fp8" if cfg.quantization else cfg.dtype
        kv_dtype = KV_DTYPES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        if kv_dtype == "auto":
            kv_dtype = "float32" if weights == "float32" else "bfloat16"
        found = check(
            Deployment(
                cfg,
                Layout(
                    tp=self.tp,
                    dcp_size=self.dcp_size,
                    page_size=self.page_size,
                    weights=weights,  # type: ignore[arg-type]
                    kv_dtype=kv_dtype,  # type: ignore[arg-type]
                    index_replicated=self.index_cache == "replicated",
                    dcp_comm="a2a" if self.dcp_comm == "auto" else self.dcp_comm,
                ),
                None if self.device is None else device(self.device),
                mem_fraction_static=self.mem_fraction_static,
                reserve_bytes=round(self.reserve_gb * GB),
                max_model_len=self.max_model_len,
                max_running_requests=self.max_running_requests,
                chunked_prefill_size=self.chunked_prefill_size,
                prefill=self.prefill,
                max_total_tokens=self.max_total_tokens,
            )
        )
        if self.json:
            _print_json(found)
            return
        for table in check_tables(found):
            console.print(table)
        if weights == "fp8":
            console.print("Planned with FP8 weights, which the engine does not read yet.")


COMMANDS = {"plan": Plan, "check-config": CheckConfig}
