"""`dcp-jax bench prefill`: times the prefill paths here and proposes thresholds."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from dcp_jax.cli.engine import aliases
from dcp_jax.policy import PrefillPath

_KV = Literal["auto", "float32", "bf16", "bfloat16", "fp8_e4m3", "fp8"]


@dataclasses.dataclass(frozen=True)
class BenchPrefill:
    """Time the prefill paths on the same inputs, compare their outputs, propose thresholds.

    Exit code 1: outputs of the paths do not agree.
    """

    model: Positional[Path | None] = None
    """Checkpoint directory; with --random-weights only its config is read."""
    config: str | None = None
    """Instead: a released model, deepseek-v3.2, glm-5 or glm-5.2; needs --random-weights."""
    random_weights: bool = False
    """Draw weights on the devices; feed-forward parts are then dense."""
    layers: int | None = None
    """Layers of the timed step and of the caches (with --random-weights); default: all."""
    prefix: tuple[str, ...] = ("0", "8192", "32768")
    """Cached tokens of each row; several values."""
    extend: tuple[str, ...] = ("512", "2048")
    """New tokens of each row; several values."""
    batch: tuple[str, ...] = ("1",)
    """Rows; several values."""
    paths: tuple[str, ...] = tuple(path.value for path in PrefillPath)
    """Which paths."""
    part: tuple[str, ...] = ("attention", "layer")
    """attention or layer, of one layer each; step, of all --layers."""
    gather_chunk_tokens: tuple[str, ...] = ("32768",)
    """Keys gathered at a time by the gathered paths; several values are timed apart."""
    repeats: int = 5
    """Timed runs, of which the median counts."""
    tp: Annotated[int, aliases("--tp-size", "--tensor-parallel-size", "-tp")] = 1
    """Devices in all."""
    dcp_size: Annotated[int, aliases("--decode-context-parallel-size", "--dcp", "-dcp")] = 1
    """How many of them share the tokens of the caches; divides tp."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; float32 compares selected sets exactly."""
    kv_cache_dtype: _KV = "auto"
    """Of both caches."""
    index_cache: Literal["sharded", "replicated"] = "sharded"
    """Indexer keys sharded over the ranks, or whole on each of them."""
    dcp_comm: Annotated[Literal["a2a", "ag_rs"], aliases("--dcp-comm-backend")] = "a2a"
    """Collectives of the merge of partial attention outputs."""
    page_size: Annotated[int, aliases("--block-size")] = 64
    """Rows of a page on each rank."""
    seed: int = 0
    """Of weights, caches and inputs."""
    output: Path | None = None
    """JSONL file that records are appended to."""
    fit: Annotated[tuple[Path, ...] | None, arg(metavar="[F.jsonl ...]")] = None
    """Propose thresholds: from these files, without timing anything; or alone, from this run."""

    def run(self, console: Console) -> None:
        """Time or read, print tables, write, fit."""
        if self.fit:
            from dcp_jax.bench.records import read_records

            self._no_model_beside_files()
            self._print_fits(console, read_records(*self.fit))
            return
        options = self._options()
        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(
                f"--output {self.output}: there is no directory {self.output.parent}; make it."
            )
        # JAX takes 0.75 of a GPU unless told otherwise before its backend starts.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        from dcp_jax.bench.records import write_records
        from dcp_jax.bench.run import prefill
        from dcp_jax.bench.tables import result_tables, skip_notes

        records = []
        for record in prefill(options):
            records.append(record)
            if self.output is not None:  # at once: a long run may be interrupted
                write_records(self.output, [record])
        for table in result_tables(records):
            console.print(table)
        for note in skip_notes(records):
            console.print(note, markup=False, highlight=False)
        if self.fit is not None:
            self._print_fits(console, records)
        if any(r.agreement is not None and not r.agreement.agrees for r in records):
            print("dcp-jax: outputs of the paths do not agree (see NO above).", file=sys.stderr)
            sys.exit(1)

    def _no_model_beside_files(self) -> None:
        if self.model is not None or self.config is not None:
            raise ValueError(
                "--fit with files times nothing, so a model has no use beside it: leave the model "
                "out, or give --fit alone to fit this run."
            )

    def _options(self):
        """What to time.

        Raises:
            ValueError: the first thing that is wrong.
        """
        from dcp_jax.bench.cases import grid, whole_numbers
        from dcp_jax.bench.options import PrefillOptions
        from dcp_jax.named import NAMES, find_model

        if (self.model is None) == (self.config is None):
            raise ValueError(
                "give one model: a checkpoint directory, or --config with the name of a released "
                "model."
            )
        cases = grid(
            whole_numbers("--prefix", self.prefix, least=0),
            whole_numbers("--extend", self.extend, least=1),
            whole_numbers("--batch", self.batch, least=1),
        )
        model = find_model(str(self.model)) if str(self.model) in NAMES else self.model
        return PrefillOptions(
            model=self.config or model,  # type: ignore[arg-type]
            cases=cases,
            random_weights=self.random_weights,
            layers=self.layers,
            paths=self.paths,  # type: ignore[arg-type]
            parts=self.part,
            gather_chunk_tokens=whole_numbers(
                "--gather-chunk-tokens", self.gather_chunk_tokens, least=1
            ),
            repeats=self.repeats,
            tp=self.tp,
            dcp_size=self.dcp_size,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            index_cache=self.index_cache,
            dcp_comm=self.dcp_comm,
            page_size=self.page_size,
            seed=self.seed,
            progress=True,
        )

    def _print_fits(self, console: Console, records: list) -> None:
        from dcp_jax.bench.tables import fit_notes, fit_tables
        from dcp_jax.bench.thresholds import fit

        for fitted in fit(records):
            for table in fit_tables(fitted):
                console.print(table)
            for note in fit_notes(fitted):
                console.print(note, markup=False, highlight=False)


COMMANDS = {"bench prefill": BenchPrefill}
