"""`dcp-jax bench passkey`: does the model find a number in long text, and at every dcp_size?"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import EnumChoicesFromValues, Positional, arg

from dcp_jax.cli.engine import aliases
from dcp_jax.policy import PrefillPolicy


@dataclasses.dataclass(frozen=True)
class BenchPasskey:
    """Hide keys of five digits in long text and ask for one, greedily; count the hits.

    Exit code 1: --compare found a variant that answers otherwise than W=1 in float32.
    """

    model: Positional[Path]
    """Checkpoint directory with a tokenizer, or tiny-dsa."""
    lengths: tuple[int, ...] = (1024, 4096, 8192)
    """Tokens of the prompts; several values."""
    depths: tuple[float, ...] = (0.05, 0.5, 0.95)
    """Where the key stands, 0 (the beginning) to 1; several values."""
    trials: int = 10
    """Prompts of each length, depth and number of needles."""
    needles: tuple[int, ...] = (1,)
    """Keys in a prompt, 1 to 8; from 2 on they have names, and one is asked for; several values."""
    dcp_size: Annotated[int, aliases("--decode-context-parallel-size", "--dcp", "-dcp")] = 1
    """Ranks that share the tokens of the caches."""
    tp: Annotated[int | None, aliases("--tp-size", "--tensor-parallel-size", "-tp")] = None
    """Devices in all; default: dcp_size."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations."""
    kv_cache_dtype: Literal["auto", "float32", "bf16", "bfloat16", "fp8_e4m3", "fp8"] = "auto"
    """Of both caches."""
    index_cache: Literal["sharded", "replicated"] = "sharded"
    """Indexer keys sharded over the ranks, or whole on each of them."""
    prefill: Annotated[PrefillPolicy, EnumChoicesFromValues] = dataclasses.field(
        default_factory=PrefillPolicy
    )
    """Thresholds of the prefill paths."""
    chunked_prefill_size: Annotated[
        int, aliases("--max-num-batched-tokens", "--max-prefill-token-num")
    ] = 8192
    """Tokens of a prompt per step."""
    page_size: Annotated[int, aliases("--block-size")] = 64
    """Rows of a page on each rank."""
    batch: int = 8
    """Prompts together."""
    seed: int = 0
    """Of digits, names and filler."""
    compare: Annotated[tuple[str, ...], arg(metavar="{all|W [W ...]}")] = ()
    """Ask the same at these dcp sizes (all: 2, 4, 8), on every path, with sharded and replicated
    index and with float32 and e4m3 caches, and compare with W=1 in float32."""
    output: Path | None = None
    """JSON file for cells, misses and differences."""

    def run(self, console: Console) -> None:
        """Make prompts, load, ask, print, write."""
        from dcp_jax.bench.passkey import prompts_of, text_model
        from dcp_jax.bench.passkey_trials import trials_of

        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(
                f"--output {self.output}: there is no directory {self.output.parent}; make it."
            )
        if self.batch < 1:
            raise ValueError(f"--batch {self.batch} asks nothing: give 1 or more.")
        sizes = self._compared()
        if sizes and self.dtype == "auto":
            console.print("comparing: activations in float32", style="dim")
        directory, config, tokenizer = text_model(self.model)
        trials = trials_of(self.lengths, self.depths, self.trials, self.needles, self.seed)
        prompts = prompts_of(trials, tokenizer, config)
        # JAX takes 0.75 of a GPU unless told otherwise before its backend starts.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        found: dict[str, Any] = {"model": str(self.model), "options": self._options()}
        agreements = []
        if sizes:
            agreements = self._compare(console, found, directory, config, prompts, sizes)
        else:
            outcomes = self._ask(directory, prompts)
            self._count(console, found, outcomes)
        if self.output is not None:
            self.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if not all(one.holds for one in agreements):
            print("dcp-jax: answers differ from those of W=1 (see NO above).", file=sys.stderr)
            sys.exit(1)

    def _compared(self) -> tuple[int, ...]:
        from dcp_jax.bench.passkey_compare import DCP_SIZES

        if self.compare == ("all",):
            return DCP_SIZES
        try:
            sizes = tuple(map(int, self.compare))
        except ValueError:
            sizes = (0,)
        if any(size < 1 for size in sizes):
            raise ValueError(
                f"--compare {' '.join(self.compare)} is no list of dcp sizes: give all, or some "
                "of 1 2 4 8."
            )
        ignored = [
            name
            for name in ("dcp_size", "tp", "kv_cache_dtype", "index_cache", "prefill")
            if getattr(self, name) != getattr(BenchPasskey(self.model), name)
        ]
        if sizes and ignored:
            raise ValueError(
                f"--{ignored[0].replace('_', '-')} has no effect beside --compare, which tries "
                "them all: leave it out."
            )
        return sizes

    def _compare(self, console, found, directory, config, prompts, sizes) -> list:
        from dcp_jax.bench import passkey_compare as comparing
        from dcp_jax.devices import ensure_devices

        ensure_devices(max(sizes))  # before the backend starts with fewer
        dtype = "float32" if self.dtype == "auto" else self.dtype
        variants = comparing.variants_of(sizes, precisions=[(dtype, dtype), (dtype, "fp8_e4m3")])
        reference = self._at(directory, comparing.REFERENCE, prompts)
        self._count(console, found, reference)
        agreements = []
        for agreement in comparing.compare(
            directory,
            config.index_topk,
            reference,
            variants,
            lambda variant, some: self._at(directory, variant, some),
        ):
            agreements.append(agreement)
        console.print(comparing.agreement_table(agreements))
        differences = [d for one in agreements for d in one.differences]
        if differences:
            console.print(comparing.difference_table(differences))
        found["compare"] = [one.record() for one in agreements]
        return agreements

    def _at(self, directory: Path, variant, prompts: Sequence) -> list:
        """Ask at a variant."""
        return self._ask(
            directory,
            prompts,
            name=variant.name,
            tp=variant.dcp_size,
            dcp_size=variant.dcp_size,
            dtype=variant.dtype,
            kv_cache_dtype=variant.kv_cache_dtype,
            index_cache=variant.index_cache,
            prefill_policy=variant.policy,
        )

    def _ask(self, directory: Path, prompts: Sequence, name: str = "passkey", **changes) -> list:
        from dcp_jax.bench.passkey import longest, retrieve
        from dcp_jax.llm import LLM

        options: dict[str, Any] = {
            "tp": self.dcp_size if self.tp is None else self.tp,
            "dcp_size": self.dcp_size,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "index_cache": self.index_cache,
            "prefill_policy": self.prefill,
            **changes,
        }
        llm = LLM(
            directory,
            chunked_prefill_size=self.chunked_prefill_size,
            page_size=self.page_size,
            max_model_len=longest(prompts),
            max_running_requests=self.batch,
            **options,
        )
        return list(retrieve(llm, prompts, batch=self.batch, name=name))

    def _count(self, console: Console, found: dict[str, Any], outcomes: list) -> None:
        from dcp_jax.bench.passkey import cells_of, hit_tables, report

        for table in hit_tables(cells_of(outcomes)):
            console.print(table)
        found |= report(outcomes)

    def _options(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        for name in ("model", "output"):
            del values[name]
        force = self.prefill.force
        values["prefill"]["force"] = force and force.value
        return values


COMMANDS = {"bench passkey": BenchPasskey}
