"""The command line, `dcp-jax COMMAND`: generate, chat, explain, plan, selfcheck, bench and others.

Option names are SGLang's, with vLLM's and LMDeploy's spellings as aliases. A refusal is one message
on stderr and exit code 2.
"""

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from dcp_jax.cli.bench import COMMANDS as BENCH_COMMANDS
from dcp_jax.cli.bench_engine import COMMANDS as BENCH_ENGINE_COMMANDS
from dcp_jax.cli.chat import Chat
from dcp_jax.cli.engine import EngineArgs
from dcp_jax.cli.parse import parse
from dcp_jax.cli.plan import COMMANDS as PLAN_COMMANDS
from dcp_jax.cli.sampling import SamplingArgs
from dcp_jax.cli.selfcheck import COMMANDS as CHECK_COMMANDS


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts: text, or token ids."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text; may be repeated."""
    prompt_ids: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Token ids, separated by commas or spaces; may be repeated."""

    def listed(self) -> list:
        """All prompts, texts first."""
        found = [*self.prompt, *(_ids(text) for text in self.prompt_ids)]
        if not found:
            raise ValueError("no prompt: give --prompt TEXT or --prompt-ids 1,2,3.")
        return found


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"--prompt-ids {text!r} is not a list of whole numbers: write 1,2,3."
        ) from None


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue prompts."""

    engine: Annotated[EngineArgs, arg(name="")]
    prompts: Annotated[Prompts, arg(name="")]
    sampling: Annotated[SamplingArgs, arg(name="")]
    n: int = 1
    """Continuations per prompt."""
    logprobs: int | None = None
    """Report log-probabilities (with --json)."""
    json: bool = False
    """Print one JSON object per prompt."""

    def run(self, console: Console) -> None:
        """Load, generate, print."""
        from dcp_jax.engine.sampling_params import SamplingParams

        self.sampling.check()
        number: dict[str, Any] = {"n": self.n, "logprobs": self.logprobs}
        SamplingParams(**number)  # refused before anything loads
        prompts = self.prompts.listed()
        llm = self.engine.load(prompts, generate=1)
        given = self.sampling.given() | number
        params = dataclasses.replace(llm.default_sampling_params(), **given)
        for output in llm.generate(prompts, params):
            if self.json:
                print(json.dumps(dataclasses.asdict(output)))
                continue
            for completion in output.outputs:
                ids = " ".join(map(str, completion.token_ids))
                shown = ids if llm.tokenizer is None else completion.text
                name = (
                    f"{output.request_id}.{completion.index}" if self.n > 1 else output.request_id
                )
                print(f"[{name}] {shown}")


@dataclasses.dataclass(frozen=True)
class Explain:
    """Show what the indexer selects for a prompt, who owns it and what the ranks exchange."""

    engine: Annotated[EngineArgs, arg(name="")]
    prompts: Annotated[Prompts, arg(name="")]
    layers: tuple[int, ...] = ()
    """Full layers to show; default: all."""
    positions: bool = False
    """Also print the positions that the last token selected."""

    def run(self, console: Console) -> None:
        """Load, explain every prompt, print tables."""
        from dcp_jax.tables import exchange_table, selection_table

        prompts = self.prompts.listed()
        llm = self.engine.load(prompts, generate=0)
        for number, prompt in enumerate(prompts):
            report = llm.explain(prompt, list(self.layers) or None)
            paths = ", ".join(dict.fromkeys(path.value for path in report.prefill_paths))
            console.print(f"prompt {number}: prefill path {paths}")
            console.print(selection_table(report))
            console.print(exchange_table(report.bytes_exchanged))
            if self.positions:
                for layer, chosen in report.topk_indices.items():
                    console.print(f"layer {layer}: {[int(p) for p in chosen[-1] if p >= 0]}")


@dataclasses.dataclass(frozen=True)
class Demo:
    """Generate at dcp_size 1 and W from a checkpoint with known tokens, and compare all three."""

    case: Positional[Path]
    """A directory of tests/golden."""
    dcp_size: int = 8
    """W."""

    def run(self, console: Console) -> None:
        """Run the demonstration; exit code 1 if tokens differ."""
        from dcp_jax.demo import run

        if not run(self.case, self.dcp_size, console):
            sys.exit(1)


def main(args: list[str] | None = None) -> None:
    """Entry point of `dcp-jax`."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    command = parse(
        {
            "generate": Generate,
            "chat": Chat,
            "explain": Explain,
            "demo": Demo,
            **PLAN_COMMANDS,
            **CHECK_COMMANDS,
            **BENCH_COMMANDS,
            **BENCH_ENGINE_COMMANDS,
        },
        args,
        prog="dcp-jax",
        description="GLM-5 and DeepSeek-V3.2 in JAX under decode context parallelism.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        command.run(Console())
    except ValueError as error:
        print(f"dcp-jax: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
