"""Model and engine options of the command line.

Names are SGLang's; vLLM's and LMDeploy's spellings are aliases of the same option.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import EnumChoicesFromValues, Positional, arg

from dcp_jax.policy import PrefillPolicy


def aliases(*flags: str):
    """Other spellings of one option."""
    return arg(aliases=flags)


@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """Model and engine."""

    model: Positional[Path | None] = None
    """Checkpoint directory, Hugging Face or Orbax."""
    model_path: Path | None = None
    """The same, as an option."""
    tp: Annotated[int, aliases("--tp-size", "--tensor-parallel-size", "-tp")] = 1
    """Devices that the weights are spread over, in all."""
    dcp_size: Annotated[int, aliases("--decode-context-parallel-size", "--dcp", "-dcp")] = 1
    """How many of them share the tokens of the caches; divides tp."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; float32 computes with highest precision."""
    kv_cache_dtype: Literal["auto", "float32", "bf16", "bfloat16", "fp8_e4m3", "fp8"] = "auto"
    """Of both caches."""
    dcp_comm: Annotated[Literal["auto", "a2a", "ag_rs"], aliases("--dcp-comm-backend")] = "auto"
    """Collectives of the merge of partial attention outputs."""
    index_cache: Literal["sharded", "replicated"] = "sharded"
    """Indexer keys sharded over the ranks, or whole on each of them."""
    kernels: Literal["auto", "xla"] = "auto"
    """Implementation of every op."""
    max_model_len: Annotated[int | None, aliases("--context-length", "--session-len")] = None
    """Tokens of a prompt and its continuation together."""
    max_running_requests: Annotated[int, aliases("--max-num-seqs", "--max-batch-size")] = 64
    """Sequences decoded together."""
    max_queued_requests: int | None = None
    """Requests that may wait; default: any number."""
    chunked_prefill_size: Annotated[
        int, aliases("--max-num-batched-tokens", "--max-prefill-token-num")
    ] = 8192
    """Tokens of prompts per step."""
    decode_steps: Annotated[int, aliases("--num-scheduler-steps")] = 1
    """Tokens that a decode launch draws for each request."""
    disable_radix_cache: Annotated[bool, aliases("--no-enable-prefix-caching")] = False
    """Share no pages between prompts that begin alike."""
    page_size: Annotated[int, aliases("--block-size")] = 64
    """Rows of a page on each rank."""
    mem_fraction_static: Annotated[
        float, aliases("--gpu-memory-utilization", "--cache-max-entry-count")
    ] = 0.9
    """Share of device memory for weights and caches."""
    max_total_tokens: int | None = None
    """Size of the pool over all ranks; default: what fits."""
    compilation_cache_dir: Path | None = None
    """Where compiled programs are kept for the next start."""
    prefill: Annotated[PrefillPolicy, EnumChoicesFromValues] = dataclasses.field(
        default_factory=PrefillPolicy
    )
    """Thresholds of the prefill paths."""

    @property
    def enable_prefix_caching(self) -> bool:
        """The argument of `LLM`."""
        return not self.disable_radix_cache

    def load(self, prompts: list, *, generate: int, needs_tokenizer: bool = False):
        """The `LLM` that these options describe; unusable prompts are refused before it loads.

        Args:
            prompts: what it will be asked.
            generate: tokens that each prompt must leave room for.
            needs_tokenizer: refuse a checkpoint without one.
        """
        model = self.model or self.model_path
        if model is None or (self.model and self.model_path):
            raise ValueError(
                "give the checkpoint directory once: as the first argument or as --model-path."
            )
        # JAX takes 0.75 of a GPU unless told otherwise before its backend starts; the process is
        # ours alone here, and mem_fraction_static is a share of what JAX takes.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        from dcp_jax.config import ModelConfig
        from dcp_jax.llm import LLM
        from dcp_jax.prompts import check_fits, token_ids
        from dcp_jax.tokenizer import load_tokenizer

        config, tokenizer = ModelConfig.from_hf(model), load_tokenizer(model)
        if needs_tokenizer and tokenizer is None:
            raise ValueError(
                f"{model} has no tokenizer.json: a chat is text, so add the checkpoint's tokenizer "
                "files, or use generate with --prompt-ids."
            )
        for number, prompt in enumerate(prompts):
            name = f"prompt {number}"
            ids = token_ids(prompt, name, tokenizer, config.vocab_size)
            limit = self.max_model_len or config.max_position_embeddings
            check_fits(ids, name, limit, generate=generate)
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("model", "model_path", "prefill", "kernels", "disable_radix_cache"):
            options.pop(name)
        llm = LLM(
            model,
            prefill_policy=self.prefill,
            enable_prefix_caching=self.enable_prefix_caching,
            kernels=self.kernels,
            progress=True,
            **options,
        )
        for name, (real, held) in llm.padding.items():
            print(f"{name}: zero-padded from {real} to {held} for tp={self.tp}", file=sys.stderr)
        return llm
