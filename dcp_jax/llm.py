"""`LLM`: a checkpoint on a mesh, ready to generate, score and explain from Python."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from dcp_jax.cache.pool import CacheSpec
from dcp_jax.cache.sizing import Capacity, capacity, size_pool
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.step import StepOptions
from dcp_jax.devices import ensure_devices
from dcp_jax.engine.engine import Chunk, Engine, Progress
from dcp_jax.engine.options import check_options
from dcp_jax.engine.runner import Runner
from dcp_jax.engine.sequence import CompletionOutput, RequestOutput, SamplingParams, Sequence
from dcp_jax.layers.sizes import padding
from dcp_jax.mesh import DCP, check_sizes, make_mesh, tp_size
from dcp_jax.model import Model
from dcp_jax.policy import PrefillPolicy
from dcp_jax.prompts import Prompt, as_list, check_fits, text_of, token_ids
from dcp_jax.reports import (
    ExplainReport,
    PromptLogprobs,
    explain_report,
    log_softmax,
    row_of,
)
from dcp_jax.tokenizer import Tokenizer, load_tokenizer
from dcp_jax.weights.hf import load_hf
from dcp_jax.weights.orbax import is_orbax, load_orbax

logger = logging.getLogger(__name__)


class LLM:
    """A GLM-5 or DeepSeek-V3.2 model under tensor parallelism and decode context parallelism.

    Attributes:
        config: the model's configuration.
        capacity: tokens that fit in the caches, and their bytes.
        max_model_len: tokens of a prompt and its continuation together, at most.
        padding: sizes that tp does not divide: name -> (real size, zero-padded size in memory).
        engine: the loop over steps; `engine.runner` holds the caches and counts compilations.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        *,
        tp: int = 1,
        dcp_size: int = 1,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        kv_cache_dtype: Literal["auto", "float32", "bf16", "fp8_e4m3", "fp8"] = "auto",
        prefill_policy: PrefillPolicy | None = None,
        dcp_comm: Literal["auto", "a2a", "ag_rs"] = "auto",
        index_cache: Literal["sharded", "replicated"] = "sharded",
        kernels: str | None = None,
        max_model_len: int | None = None,
        max_running_requests: int = 64,
        chunked_prefill_size: int = 8192,
        page_size: int = 64,
        mem_fraction_static: float = 0.9,
        max_total_tokens: int | None = None,
        params: dict | None = None,
        mesh: Mesh | None = None,
        progress: bool = False,
    ):
        """Load the model and allocate its caches.

        Args:
            model: a Hugging Face or Orbax checkpoint directory; with `params`, its config suffices.
            tp: devices in all that the weights are spread over.
            dcp_size: how many of them share the tokens of the caches; divides `tp`.
            dtype: of weights and activations; "float32" computes with highest precision.
            kv_cache_dtype: of both caches; "auto" is float32 with dtype float32, else bf16.
            prefill_policy: thresholds of the prefill paths.
            dcp_comm: collectives of the merge of partial attention outputs.
            index_cache: indexer keys sharded over the ranks, or whole on each.
            kernels: implementation of every op; None takes the best available.
            max_model_len: default: what the model allows and the pool holds.
            max_running_requests: sequences decoded together.
            chunked_prefill_size: tokens of a prompt per step.
            page_size: rows of a page on each rank.
            mem_fraction_static: of device memory, for weights and caches.
            max_total_tokens: size of the pool over all ranks; default: what fits.
            params: arrays already in memory, as `weights.load_hf` returns them.
            mesh: an existing mesh; replaces `tp` and `dcp_size`.
            progress: show a bar while weights load.

        Raises:
            ValueError: an option or combination that cannot work, all of them in one message.
        """
        if mesh is not None:
            tp, dcp_size = tp_size(mesh), mesh.shape[DCP]
        policy = prefill_policy or PrefillPolicy()
        options = check_options(
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            dcp_comm=dcp_comm,
            index_cache=index_cache,
            kernels=kernels,
            tp=tp,
            dcp_size=dcp_size,
            max_model_len=max_model_len,
            max_running_requests=max_running_requests,
            chunked_prefill_size=chunked_prefill_size,
            page_size=page_size,
            mem_fraction_static=mem_fraction_static,
            max_total_tokens=max_total_tokens,
        )
        check_sizes(tp, dcp_size)
        if isinstance(model, ModelConfig):
            directory, self.config = None, model
        else:
            directory, self.config = Path(model), ModelConfig.from_hf(model)
        if directory is None and params is None:
            raise ValueError(
                "model is a ModelConfig without params: give a directory or the params."
            )
        if max_model_len is not None and max_model_len > self.config.max_position_embeddings:
            raise ValueError(
                f"max_model_len={max_model_len} exceeds the model's max_position_embeddings="
                f"{self.config.max_position_embeddings}: positions beyond it were never trained; "
                "give at most that."
            )
        if mesh is None:
            ensure_devices(tp)
            mesh = make_mesh(tp, dcp_size)
        compute = self.config.dtype if dtype == "auto" else dtype
        self.model = Model(self.config, mesh, jnp.dtype(compute))
        if params is None:
            assert directory is not None
            params = self._load(directory, progress)
        stored = options.kv_dtype or ("float32" if compute == "float32" else "bfloat16")
        spec = size_pool(
            CacheSpec.of(
                self.config,
                pages=1,
                page_size=page_size,
                dcp_size=dcp_size,
                kv_dtype=stored,
                index_replicated=index_cache == "replicated",
            ),
            mesh,
            max_total_tokens=max_total_tokens,
            mem_fraction_static=mem_fraction_static,
            most_useful_tokens=max_running_requests
            * (max_model_len or self.config.max_position_embeddings),
        )
        self.max_model_len = max_model_len or min(self.config.max_position_embeddings, spec.tokens)
        if self.max_model_len > spec.tokens:
            raise ValueError(
                f"max_model_len={self.max_model_len} does not fit the pool of {spec.tokens} "
                f"tokens: give at most {spec.tokens}, or raise max_total_tokens, "
                "mem_fraction_static or dcp_size."
            )
        self.engine = Engine(
            Runner(
                self.model,
                params,
                spec,
                StepOptions(
                    page_size=page_size,
                    dcp_comm=options.dcp_comm,
                    index_cache=index_cache,
                    gather_chunk_tokens=policy.gather_chunk_tokens,
                    kernels=kernels,
                ),
                largest_step=chunked_prefill_size,
            ),
            policy=policy,
            eos_token_ids=self.config.eos_token_ids,
            max_running_requests=max_running_requests,
            chunked_prefill_size=chunked_prefill_size,
        )
        self.capacity: Capacity = capacity(spec)
        self.padding = padding(self.config, tp)
        for name, (real, held) in self.padding.items():
            logger.info("%s is padded from %s to %s for tp=%s", name, real, held, tp)
        self.tokenizer: Tokenizer | None = load_tokenizer(directory) if directory else None

    def _load(self, directory: Path, progress: bool) -> dict:
        defs, mesh = self.model.param_defs, self.model.mesh
        if is_orbax(directory):
            return load_orbax(directory, defs, mesh)
        return load_hf(directory, self.config, defs, mesh, progress=progress)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or
                a list of those, of any lengths.
            sampling_params: the same for all.
            use_tqdm: show a bar of finished requests and generated tokens per second.

        Raises:
            ValueError: a prompt that is empty, too long, or not of the vocabulary; nothing has run.
        """
        params = sampling_params or SamplingParams()
        listed = as_list(prompts)
        sequences = []
        for number, prompt in enumerate(listed):
            ids = self._read_prompt(prompt, f"prompt {number}", generate=1)
            room = self.max_model_len - len(ids)
            sequences.append(Sequence(ids, params, limit=min(params.max_tokens, room)))
        with tqdm(total=len(sequences), desc="generate", unit="req", disable=not use_tqdm) as bar:
            done = Progress()

            def on_step(progress: Progress) -> None:
                nonlocal done
                done = Progress(*map(sum, zip(done, progress, strict=True)))
                bar.update(progress.finished)
                rate = done.generated / (bar.format_dict["elapsed"] or 1e-9)
                bar.set_postfix_str(
                    f"{done.prefilled} prompt + {done.generated} new tokens, {rate:.1f} tok/s"
                )

            self.engine.run(sequences, on_step)
        return [
            self._output(number, prompt, sequence)
            for number, (prompt, sequence) in enumerate(zip(listed, sequences, strict=True))
        ]

    def score(
        self,
        prompt: Prompt,
        positions: list[int] | None = None,
        *,
        output: Literal["logits", "logprobs"] = "logits",
        top_logprobs: int = 0,
        max_bytes: int = 2**30,
    ) -> np.ndarray | PromptLogprobs:
        """Teacher-forced logits of a prompt, or log-probabilities of its own tokens.

        Args:
            prompt: text or token ids.
            positions: query positions to return (default: all; all but the last for logprobs).
            output: "logits" float32 [positions, vocab], or "logprobs".
            top_logprobs: with "logprobs": how many of the most likely tokens to return beside.
            max_bytes: largest result that is returned, and most of the logits held at a time.

        Raises:
            ValueError: positions outside the prompt, or a result larger than `max_bytes`.
        """
        if output not in ("logits", "logprobs"):
            raise ValueError(f'output={output!r} is unknown: use "logits" or "logprobs".')
        ids = self._read_prompt(prompt, "the prompt", generate=0)
        vocab = self.config.vocab_size
        last = len(ids) if output == "logits" else len(ids) - 1
        wanted = np.arange(last) if positions is None else np.asarray(positions, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < last):
            raise ValueError(
                f"positions must lie in 0..{last - 1} for {output} of a prompt of {len(ids)} "
                f"tokens: got {wanted.min()} to {wanted.max()}."
            )
        if not 0 <= top_logprobs <= vocab or (top_logprobs and output == "logits"):
            raise ValueError(
                f"top_logprobs={top_logprobs} with output={output!r}: it goes with "
                f'output="logprobs" and is at most the vocabulary, {vocab}.'
            )
        if output == "logits" and wanted.size * vocab * 4 > max_bytes:
            raise ValueError(
                f"the logits of {wanted.size} positions take {wanted.size * vocab * 4:,} bytes, "
                f"more than max_bytes={max_bytes:,}: name fewer positions, use "
                'output="logprobs", or raise max_bytes.'
            )
        parts, ascending = [], np.sort(wanted)
        for chunk in self._read(ids, chunk=max(1, max_bytes // (vocab * 4)), logits="all"):
            end = chunk.start + chunk.length
            here = ascending[(ascending >= chunk.start) & (ascending < end)]
            logits = chunk.result.logits[0, here - chunk.start]
            parts.append(self._scored(logits, here, ids, output, top_logprobs))
        asked = np.argsort(np.argsort(wanted, kind="stable"), kind="stable")
        joined = [np.concatenate(arrays)[asked] for arrays in zip(*parts, strict=True)]
        return joined[0] if output == "logits" else PromptLogprobs(*joined)

    def _scored(self, logits, positions, ids, output, top) -> tuple[np.ndarray, ...]:
        if output == "logits":
            return (logits,)
        logprobs = log_softmax(logits)
        own = logprobs[np.arange(len(positions)), np.asarray(ids)[positions + 1]]
        best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :top]
        return own, positions, best.astype(np.int32), np.take_along_axis(logprobs, best, axis=-1)

    def explain(self, prompt: Prompt, layers: list[int] | None = None) -> ExplainReport:
        """What the prefill of a prompt selects, per full layer, and what the ranks exchange for it.

        Read from the arrays of the very step that `generate` runs.

        Raises:
            ValueError: a layer without an indexer of its own.
        """
        full = self.config.full_layers
        chosen = full if layers is None else tuple(layers)
        strangers = [layer for layer in chosen if layer not in full]
        if strangers:
            raise ValueError(
                f"layers {strangers} have no indexer of their own: choose among {full}."
            )
        ids = self._read_prompt(prompt, "the prompt", generate=0)
        chunks = [
            (
                chunk.path,
                row_of(chunk.result.explanation, 0, chunk.length),
                chunk.result.received_bytes,
                chunk.result.reruns,
            )
            for chunk in self._read(ids, explain=True)
        ]
        return explain_report(chunks, self.config.index_topk, chosen)

    def _read(self, ids: list[int], **changes) -> Iterator[Chunk]:
        """Prefill `ids` on pages of its own, given back afterwards."""
        pages = self.engine.reserve(len(ids))
        quiet = len(ids) <= self.engine.chunked_prefill_size
        try:
            with tqdm(total=len(ids), desc="prefill", unit="tok", disable=quiet) as bar:
                for chunk in self.engine.prefill_chunks(ids, pages, **changes):
                    bar.update(chunk.length)
                    yield chunk
        finally:
            self.engine.allocator.free(pages)

    def _read_prompt(self, prompt: Prompt, name: str, *, generate: int) -> list[int]:
        """Ids of a prompt that leaves room for `generate` tokens."""
        ids = token_ids(prompt, name, self.tokenizer, self.config.vocab_size)
        check_fits(ids, name, self.max_model_len, generate=generate)
        return ids

    def _output(self, number: int, prompt: Prompt, sequence: Sequence) -> RequestOutput:
        ids = sequence.output_token_ids
        shown = ids[:-1] if sequence.finish_reason == "stop" else ids
        text = self.tokenizer.decode(shown) if self.tokenizer else ""
        completion = CompletionOutput(0, text, ids, sequence.finish_reason or "length")
        return RequestOutput(
            request_id=str(number),
            prompt=text_of(prompt),
            prompt_token_ids=sequence.prompt_token_ids,
            outputs=[completion],
        )
