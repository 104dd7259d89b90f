"""`dcp-jax bench throughput|engine|soak`: how fast the engine is here, and that it keeps going."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from dcp_jax.cli.engine import EngineArgs, aliases

_SHOWN = {
    "output_throughput": "output tokens/s",
    "output_throughput_per_device": "output tokens/s per device",
    "total_token_throughput": "input and output tokens/s",
    "request_throughput": "requests/s",
    "interactivity": "tokens/s of one user (1000 / median TPOT)",
    "max_concurrent_requests": "peak running requests",
    "peak_kv_cache_usage": "peak KV use",
    "cached_input_tokens": "input tokens from the prefix cache",
    "preemptions": "preemptions",
    "passkey_accuracy": "passkeys found",
}


@dataclasses.dataclass(frozen=True)
class BenchThroughput:
    """Run a batch of prompts offline, and measure it; nothing is downloaded."""

    engine: Annotated[EngineArgs, arg(name="")]
    dataset_name: Literal["random", "passkey", "multi-turn"] = "random"
    """Random tokens; a key hidden in a filler; conversations of several turns."""
    num_prompts: int | None = None
    """Conversations; default: 64, and 16 for multi-turn."""
    turns: int = 5
    """Turns of each conversation, for multi-turn."""
    input_len: Annotated[int, aliases("--random-input-len")] = 1024
    """New tokens of each turn."""
    output_len: Annotated[int, aliases("--random-output-len")] = 128
    """Tokens generated in each turn."""
    seed: int = 0
    """Of the prompts."""
    output: Annotated[Path | None, aliases("--output-json")] = None
    """Write the result as JSON, with the keys of vLLM's benchmarks."""

    def run(self, console: Console) -> None:
        """Load, compile, run, print, write."""
        from dcp_jax.bench.workloads import workload
        from dcp_jax.config import ModelConfig

        for name in ("num_prompts", "turns", "input_len", "output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not a count: give at least 1.")
        _check_output(self.output)
        model = self.engine.model or self.engine.model_path
        llm = self.engine.load([], generate=1)
        assert model is not None
        conversations = workload(
            self.dataset_name,
            ModelConfig.from_hf(model).vocab_size,
            num_prompts=self.num_prompts or (16 if self.dataset_name == "multi-turn" else 64),
            turns=self.turns,
            input_len=self.input_len,
            output_len=self.output_len,
            seed=self.seed,
        )
        from dcp_jax.bench.throughput import throughput

        _compile(llm, console)
        result = {
            "backend": "dcp_jax",
            "model_id": str(model),
            "dataset_name": self.dataset_name,
            "num_prompts": len(conversations),
            "tp": self.engine.tp,
            "dcp_size": self.engine.dcp_size,
            **throughput(llm, conversations),
        }
        console.print(_result_table(result))
        _write(self.output, result)


@dataclasses.dataclass(frozen=True)
class BenchEngine:
    """Say where the time of a decode step goes: scheduler, dispatch, devices, readback."""

    engine: Annotated[EngineArgs, arg(name="")]
    running: int | None = None
    """Requests that decode together; default: --max-running-requests."""
    context: int = 1024
    """Tokens of each at the beginning."""
    steps: int = 100
    """Steps that are timed."""
    output: Path | None = None
    """Write the result as JSON."""

    def run(self, console: Console) -> None:
        """Load, compile, measure, print, write."""
        for name in ("running", "context", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not a count: give at least 1.")
        _check_output(self.output)
        llm = self.engine.load([], generate=1)
        from dcp_jax.bench.steps import step_times

        running = self.running or self.engine.max_running_requests
        times = step_times(llm, running=running, context=self.context, steps=self.steps)
        result = dataclasses.asdict(times)
        title = f"a decode step of {times.running} requests of {times.context} tokens"
        table = Table("part", "us", title=title)
        table.columns[1].justify = "right"
        for name, text in {
            "scheduler_alone": "scheduler, without devices and text",
            "schedule": "  plan the step, in the engine",
            "take": "  take its tokens",
            "dispatch": f"dispatch ({times.leaves} arrays)",
            "device": "devices",
            "readback": "read tokens back",
            "wait": "the engine waits for tokens",
            "step": "a step of the engine",
        }.items():
            table.add_row(text, f"{result[name]:,.0f}")
        console.print(table)
        _write(self.output, result)


@dataclasses.dataclass(frozen=True)
class BenchSoak:
    """Run random requests for a time, and see that nothing is compiled, lost or left behind."""

    engine: Annotated[EngineArgs, arg(name="")]
    seconds: float = 600.0
    """How long."""
    seed: int = 0
    """Of the requests."""
    output: Path | None = None
    """Write the result as JSON."""

    def run(self, console: Console) -> None:
        """Load, compile, run, print, write; exit code 1 if there is a fault."""
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} is no time: give more than 0.")
        _check_output(self.output)
        llm = self.engine.load([], generate=1)
        from dcp_jax.bench.soak import soak

        _compile(llm, console)
        report = soak(llm, seconds=self.seconds, seed=self.seed)
        table = Table("", "value", title=f"{report.seconds:,.0f} s of random requests")
        table.columns[1].justify = "right"
        for name in ("steps", "generated", "preemptions", "failures", "compiled"):
            table.add_row(name, f"{getattr(report, name):,}")
        for reason, count in sorted(report.ended.items()):
            table.add_row(f"ended: {reason}", f"{count:,}")
        for name in ("arrays", "threads", "pages"):
            counts = [getattr(held, name) for held in report.held]
            table.add_row(f"{name} held when empty: first, last", f"{counts[0]}, {counts[-1]}")
        first, last = report.peak_rss_mib[0], report.peak_rss_mib[-1]
        table.add_row("peak memory in MiB: first round, last", f"{first:,.0f}, {last:,.0f}")
        console.print(table)
        _write(self.output, dataclasses.asdict(report) | {"faults": report.faults})
        for fault in report.faults:
            console.print(fault)
        if report.faults:
            sys.exit(1)


def _compile(llm, console: Console) -> None:
    """The whole ladder: nothing may compile while time is measured."""
    llm.warm_up()
    with console.status("compiling the other sizes"):
        llm.engine.executor.wait_compiled()


def _result_table(result: dict[str, Any]) -> Table:
    table = Table("", "value", title=f"{result['dataset_name']}: {result['completed']} requests")
    table.columns[1].justify = "right"
    for name, text in _SHOWN.items():
        if name in result:
            table.add_row(text, f"{result[name]:,.2f}")
    for name in ("ttft", "tpot", "itl"):
        parts = [f"{result[f'{kind}_{name}_ms']:,.2f}" for kind in ("mean", "median", "p90", "p99")]
        table.add_row(f"{name.upper()} ms: mean, median, p90, p99", " / ".join(parts))
    return table


def _check_output(output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no directory {output.parent}; make it.")


def _write(output: Path | None, result: dict[str, Any]) -> None:
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


COMMANDS = {
    "bench throughput": BenchThroughput,
    "bench engine": BenchEngine,
    "bench soak": BenchSoak,
}
