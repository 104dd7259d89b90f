"""The command line: `dcp-jax generate | explain | demo | plan | check-config`.

Option names are SGLang's, with vLLM's and LMDeploy's spellings as aliases. A refusal is one message
on stderr and exit code 2.
"""

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from dcp_jax.cli_plan import COMMANDS as PLAN_COMMANDS
from dcp_jax.policy import PrefillPolicy


def _aliases(*flags: str):
    return arg(aliases=flags)


@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """Model and engine."""

    model: Positional[Path | None] = None
    """Checkpoint directory, Hugging Face or Orbax."""
    model_path: Path | None = None
    """The same, as an option."""
    tp: Annotated[int, _aliases("--tp-size", "--tensor-parallel-size", "-tp")] = 1
    """Devices that the weights are spread over, in all."""
    dcp_size: Annotated[int, _aliases("--decode-context-parallel-size", "--dcp", "-dcp")] = 1
    """How many of them share the tokens of the caches; divides tp."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; float32 computes with highest precision."""
    kv_cache_dtype: Literal["auto", "float32", "bf16", "fp8_e4m3", "fp8"] = "auto"
    """Of both caches."""
    dcp_comm: Annotated[Literal["auto", "a2a", "ag_rs"], _aliases("--dcp-comm-backend")] = "auto"
    """Collectives of the merge of partial attention outputs."""
    index_cache: Literal["sharded", "replicated"] = "sharded"
    """Indexer keys sharded over the ranks, or whole on each of them."""
    kernels: Literal["auto", "xla"] = "auto"
    """Implementation of every op."""
    max_model_len: Annotated[int | None, _aliases("--context-length", "--session-len")] = None
    """Tokens of a prompt and its continuation together."""
    max_running_requests: Annotated[int, _aliases("--max-num-seqs", "--max-batch-size")] = 64
    """Sequences decoded together."""
    chunked_prefill_size: Annotated[
        int, _aliases("--max-num-batched-tokens", "--max-prefill-token-num")
    ] = 8192
    """Tokens of a prompt per step."""
    page_size: Annotated[int, _aliases("--block-size")] = 64
    """Rows of a page on each rank."""
    mem_fraction_static: Annotated[
        float, _aliases("--gpu-memory-utilization", "--cache-max-entry-count")
    ] = 0.9
    """Share of device memory for weights and caches."""
    max_total_tokens: int | None = None
    """Size of the pool over all ranks; default: what fits."""
    prefill: PrefillPolicy = dataclasses.field(default_factory=PrefillPolicy)
    """Thresholds of the prefill paths."""

    def load(self, prompts: list):
        """The `LLM` that these options describe; unusable prompts are refused before it loads."""
        model = self.model or self.model_path
        if model is None or (self.model and self.model_path):
            raise ValueError(
                "give the checkpoint directory once: as the first argument or as --model-path."
            )
        from dcp_jax.config import ModelConfig
        from dcp_jax.llm import LLM
        from dcp_jax.prompts import check_fits, token_ids
        from dcp_jax.tokenizer import load_tokenizer

        config, tokenizer = ModelConfig.from_hf(model), load_tokenizer(model)
        for number, prompt in enumerate(prompts):
            name = f"prompt {number}"
            ids = token_ids(prompt, name, tokenizer, config.vocab_size)
            limit = self.max_model_len or config.max_position_embeddings
            check_fits(ids, name, limit, generate=0)
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("model", "model_path", "prefill", "kernels"):
            options.pop(name)
        llm = LLM(
            model,
            prefill_policy=self.prefill,
            kernels=None if self.kernels == "auto" else self.kernels,
            progress=True,
            **options,
        )
        for name, (real, held) in llm.padding.items():
            print(f"{name}: zero-padded from {real} to {held} for tp={self.tp}", file=sys.stderr)
        return llm


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
    """Continue prompts, greedily."""

    engine: Annotated[EngineArgs, arg(name="")]
    prompts: Annotated[Prompts, arg(name="")]
    max_tokens: Annotated[int, _aliases("--max-new-tokens")] = 16
    """Tokens to generate at most."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    json: bool = False
    """Print one JSON object per prompt."""

    def run(self, console: Console) -> None:
        """Load, generate, print."""
        from dcp_jax.engine.sampling_params import SamplingParams

        prompts = self.prompts.listed()
        params = SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )
        for output in self.engine.load(prompts).generate(prompts, params):
            completion = output.outputs[0]
            if self.json:
                print(json.dumps(dataclasses.asdict(output)))
            else:
                shown = completion.text or " ".join(map(str, completion.token_ids))
                console.print(f"[{output.request_id}] {shown}", markup=False, highlight=False)


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
        llm = self.engine.load(prompts)
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
    command = tyro.extras.subcommand_cli_from_dict(
        {"generate": Generate, "explain": Explain, "demo": Demo, **PLAN_COMMANDS},
        prog="dcp-jax",
        description="GLM-5 and DeepSeek-V3.2 in JAX under decode context parallelism.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        command.run(Console())
    except ValueError as error:
        print(f"dcp-jax: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
