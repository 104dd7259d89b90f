"""Commands for a new installation: `dcp-jax selfcheck` and `dcp-jax env`."""

import dataclasses
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

_STYLES = {"ok": "green", "SKIPPED": "yellow", "FAILED": "bold red"}


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """Check the numbers of this installation on these devices, in about a minute.

    Exit code 0: all is right; 1: something is wrong; 3: nothing is wrong, but something could not
    be checked here.
    """

    model: Positional[Path | None] = None
    """Checkpoint (or tiny-dsa) to compare dcp_size 1 and W with; default: a tiny random one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the checkpoint's weights and activations; float32 compares every token."""
    json: bool = False
    """Print one JSON object per check instead of a table."""

    def run(self, console: Console) -> None:
        """Check everything, print what was measured, exit."""
        from dcp_jax.config import ModelConfig
        from dcp_jax.named import find_model
        from dcp_jax.selfcheck import exit_code, layout, mesh, ops, run

        model = None if self.model is None else find_model(self.model)
        if model is not None:
            ModelConfig.from_hf(model)  # a model that is none is refused, not a failed check
        mesh.available()  # before the backend starts: on CPU, devices can be made
        outcomes = []
        areas = (
            layout.layout_checks,
            layout.format_checks,
            ops.merge_checks,
            ops.index_checks,
            ops.topk_checks,
            ops.attention_checks,
            mesh.exchange_checks,
            partial(mesh.model_checks, model, dtype=self.dtype),
        )
        with console.status("checking") as status:
            for outcome in run(areas):
                outcomes.append(outcome)
                status.update(f"checked {outcome.area}: {outcome.check}")
        if self.json:
            for outcome in outcomes:
                fields = {**dataclasses.asdict(outcome), "status": outcome.status}
                if outcome.error is not None and not math.isfinite(outcome.error):
                    fields["error"] = str(outcome.error)  # JSON has no infinity
                print(json.dumps(fields))
        else:
            _print_outcomes(console, outcomes)
        sys.exit(exit_code(outcomes))


def _print_outcomes(console: Console, outcomes: list) -> None:
    table = Table(title="self-check")
    for name in ("area", "check"):
        table.add_column(name)
    for name in ("error", "limit"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for outcome in outcomes:
        style = _STYLES[outcome.status]
        table.add_row(
            outcome.area,
            outcome.check.replace("[", "\\["),
            "-" if outcome.error is None else f"{outcome.error:.2g}",
            f"{outcome.limit:.2g}",
            f"[{style}]{outcome.status}[/]",
        )
    console.print(table)
    for outcome in outcomes:
        if outcome.reason:
            console.print(
                f"{outcome.status}: {outcome.area}: {outcome.check}: {outcome.reason}",
                markup=False,
                highlight=False,
            )
    counts = {status: sum(o.status == status for o in outcomes) for status in _STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))


@dataclasses.dataclass(frozen=True)
class Env:
    """Print versions, devices, links and settings for a bug report."""

    json: bool = False
    """Print one JSON object."""

    def run(self, console: Console) -> None:
        """Look, print."""
        from dcp_jax.environment import environment

        found = environment()
        if self.json:
            print(json.dumps(found, default=str))
            return
        for section, content in found.items():
            console.print(f"[bold]{section}[/]")
            if isinstance(content, dict):
                lines = [f"{name}: {value}" for name, value in content.items()]
            elif isinstance(content, list):
                lines = [
                    f"{d['id']}: {d['kind']} ({d['platform']}), memory {_gib(d['memory_bytes'])}"
                    for d in content
                ]
            else:
                lines = content.splitlines()
            for line in lines or ["none"]:
                console.print(f"  {line}", markup=False, highlight=False)


def _gib(size: int | None) -> str:
    return "not known" if size is None else f"{size / 2**30:.1f} GiB"


COMMANDS = {"selfcheck": SelfCheck, "env": Env}
