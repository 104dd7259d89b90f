"""`LLM`: a checkpoint on a mesh, ready to generate, score and explain from Python."""

import inspect
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from dcp_jax.cache.pages import PagePool
from dcp_jax.cache.pool import CacheSpec
from dcp_jax.cache.sizing import Capacity, capacity, size_pool
from dcp_jax.chat.template import load_chat_template, load_template_tokens, render_chat
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.dcp.step import StepOptions
from dcp_jax.devices import ensure_devices
from dcp_jax.engine.engine import Engine
from dcp_jax.engine.executor import Executor
from dcp_jax.engine.ladder import Ladder
from dcp_jax.engine.options import check_options
from dcp_jax.engine.outputs import RequestOutput, StreamOutput
from dcp_jax.engine.paths import longest_dense_row, parallelism, possible_paths
from dcp_jax.engine.request import Request
from dcp_jax.engine.results import Pieces, request_output
from dcp_jax.engine.runner import Runner
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.scheduler import Scheduler, SchedulerOptions
from dcp_jax.engine.serving_loop import serve
from dcp_jax.engine.text import TextStream
from dcp_jax.functional import check_arrays, load_params
from dcp_jax.generation_config import GenerationConfig
from dcp_jax.layers.sizes import padding
from dcp_jax.mesh import AXES, DCP, make_mesh, tp_size
from dcp_jax.model import Model
from dcp_jax.policy import PrefillPolicy, check_forced
from dcp_jax.prompts import Prompt, as_list, check_fits, text_of, token_ids
from dcp_jax.refusals import check_keywords
from dcp_jax.reports import ExplainReport, PromptLogprobs
from dcp_jax.scoring import explain, score
from dcp_jax.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


class LLM:
    """A GLM-5 or DeepSeek-V3.2 model under tensor parallelism and decode context parallelism.

    Attributes:
        config: the model's configuration.
        capacity: tokens that fit in the caches, and their bytes.
        max_model_len: tokens of a prompt and its continuation together, at most.
        padding: sizes that tp does not divide: name -> (real size, zero-padded size in memory).
        engine: takes requests and runs steps; see `engine.serving_loop` for loops of your own.
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
        max_queued_requests: int | None = None,
        chunked_prefill_size: int = 8192,
        decode_steps: int = 1,
        enable_prefix_caching: bool = True,
        page_size: int = 64,
        mem_fraction_static: float = 0.9,
        max_total_tokens: int | None = None,
        ladder: Ladder | None = None,
        compilation_cache_dir: str | Path | None = None,
        seed: int = 0,
        params: dict | None = None,
        mesh: Mesh | None = None,
        progress: bool = False,
        **unknown: Any,
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
            kernels: implementation of every op; None or "auto" takes the best available.
            max_model_len: default: what the model allows and the pool holds.
            max_running_requests: sequences decoded together.
            max_queued_requests: more than these may not wait: submitting one raises `QueueFull`.
            chunked_prefill_size: tokens of prompts per step.
            decode_steps: tokens that a decode launch draws for each request: more of them cost
                fewer launches, and tokens arrive in groups.
            enable_prefix_caching: keep the pages of what was read for prompts that begin alike.
            page_size: rows of a page on each rank.
            mem_fraction_static: for weights and caches, of the device memory that JAX may use (0.75
                of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; the command line
                raises it to 0.95).
            max_total_tokens: size of the pool over all ranks; default: what fits.
            ladder: sizes that steps are compiled for; default: a few of each kind.
            compilation_cache_dir: where compiled programs are kept for the next start.
            seed: of the seeds of requests that name none.
            params: arrays already in memory, as `weights.load_hf` returns them.
            mesh: an existing mesh; replaces `tp` and `dcp_size`.
            progress: show a bar while weights load.
            **unknown: refused: by a sentence if other engines have the option, else by name.

        Raises:
            ValueError: an option or combination that cannot work, all of them in one message.
            TypeError: an option that does not exist.
        """
        accepted = inspect.signature(LLM).parameters
        check_keywords(unknown, {"tp": tp, "dcp_size": dcp_size}, accepted=accepted)
        if mesh is not None:
            if tuple(mesh.axis_names) != AXES:
                raise ValueError(
                    f"the mesh has the axes {mesh.axis_names}, not {AXES}: make it with make_mesh."
                )
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
            max_queued_requests=max_queued_requests,
            chunked_prefill_size=chunked_prefill_size,
            decode_steps=decode_steps,
            enable_prefix_caching=enable_prefix_caching,
            page_size=page_size,
            mem_fraction_static=mem_fraction_static,
            max_total_tokens=max_total_tokens,
            compilation_cache_dir=compilation_cache_dir,
            prefill=policy,
        )
        if isinstance(model, ModelConfig):
            directory, self.config = None, model
        else:
            directory, self.config = Path(model), ModelConfig.from_hf(model)
        self.tokenizer: Tokenizer | None = load_tokenizer(directory) if directory else None
        self.chat_template = load_chat_template(directory) if directory else None
        self._template_tokens = load_template_tokens(directory) if directory else None
        self.generation_config = GenerationConfig.from_hf(directory or {})
        self.eos_token_ids = self.generation_config.united_eos(self.config.eos_token_ids)
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
        if compilation_cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", str(compilation_cache_dir))
        if mesh is None:
            ensure_devices(tp)
            mesh = make_mesh(tp, dcp_size)
        compute = self.config.dtype if dtype == "auto" else dtype
        self.model = Model(self.config, mesh, jnp.dtype(compute))
        if params is not None:
            check_arrays(params, self.model.param_defs)
        else:
            assert directory is not None
            params = load_params(directory, self.model, progress=progress)
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
            most_useful_pages=max_running_requests
            * pages_needed(
                max_model_len or self.config.max_position_embeddings, page_size, dcp_size
            ),
        )
        self.max_model_len = max_model_len or min(self.config.max_position_embeddings, spec.tokens)
        if self.max_model_len > spec.tokens:
            raise ValueError(
                f"max_model_len={self.max_model_len} does not fit the pool of {spec.tokens} "
                f"tokens: give at most {spec.tokens}, or raise max_total_tokens, "
                "mem_fraction_static or dcp_size."
            )
        runner = Runner(
            self.model,
            params,
            spec,
            StepOptions(
                page_size=page_size,
                dcp_comm=options.dcp_comm,
                index_cache=index_cache,
                gather_chunk_tokens=policy.gather_chunk_tokens,
                kernels=None if kernels == "auto" else kernels,
            ),
            largest_step=chunked_prefill_size,
        )
        group = parallelism(runner.model)
        if ladder is None:
            ladder = Ladder.of(
                max_running_requests=max_running_requests,
                chunked_prefill_size=min(chunked_prefill_size, self.max_model_len),
                max_model_len=self.max_model_len,
                page_size=page_size,
                dcp_size=dcp_size,
                paths=possible_paths(policy, group),
                dense_tokens=longest_dense_row(policy, group),
            )
        ladder.check(
            rows=max_running_requests,
            pages=pages_needed(self.max_model_len, page_size, dcp_size),
        )
        executor = Executor(runner, ladder, slots=max_running_requests, decode_steps=decode_steps)
        scheduler = Scheduler(
            PagePool(spec.pages, page_size, dcp_size, share=enable_prefix_caching),
            SchedulerOptions(
                max_running_requests=max_running_requests,
                chunked_prefill_size=min(chunked_prefill_size, ladder.chunks[-1][1]),
                decode_steps=decode_steps,
                max_queued_requests=max_queued_requests,
            ),
        )
        self.engine = Engine(executor, scheduler, policy)
        self.capacity: Capacity = capacity(spec)
        self.padding = padding(self.config, tp)
        for name, (real, held) in self.padding.items():
            logger.info("%s is padded from %s to %s for tp=%s", name, real, held, tp)
        self._rng = np.random.default_rng(seed)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or
                a list of those, of any lengths.
            sampling_params: one for all, or a list with one per prompt; default: what the
                checkpoint recommends.
            use_tqdm: show a bar of finished requests and generated tokens per second.

        Raises:
            ValueError: a prompt that is empty, too long, or not of the vocabulary; nothing has run.
        """
        listed = as_list(prompts)
        defaults = self.default_sampling_params()
        groups = self._requests(listed, defaults if sampling_params is None else sampling_params)
        requests = [request for group in groups for request in group]
        with tqdm(total=len(requests), desc="generate", unit="req", disable=not use_tqdm) as bar:
            mine, prefilled, generated = set(requests), 0, 0
            for report in serve(self.engine, requests):
                prefilled += report.prefilled
                generated += report.generated
                bar.update(sum(request in mine for request in report.finished))
                rate = generated / (bar.format_dict["elapsed"] or 1e-9)
                bar.set_postfix_str(
                    f"{prefilled} prompt + {generated} new tokens, {rate:.1f} tok/s", refresh=False
                )
        return [
            request_output(str(number), text_of(prompt), group, self.tokenizer)
            for number, (prompt, group) in enumerate(zip(listed, groups, strict=True))
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """Continue one prompt, piece by piece; stop iterating to abandon it.

        Text comes as soon as it is certain: whole characters, nothing that a stop string may still
        take back. The pieces joined are what `generate` returns.

        Raises:
            ValueError: as `generate`, before the first piece.
        """
        group = self.requests(prompt, sampling_params)
        asked = group[0].params.prompt_logprobs
        if asked is not None:
            raise ValueError(f"prompt_logprobs={asked} are not streamed: use generate or score.")
        return self._pieces(group)

    def _pieces(self, group: list[Request]) -> Iterator[StreamOutput]:
        pieces = Pieces(group, self.tokenizer)
        for _ in serve(self.engine, group):
            yield from pieces.new()
        yield from pieces.new()

    def requests(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> list[Request]:
        """The `n` requests of one prompt, for a serving loop of your own.

        Raises:
            ValueError: as `generate`.
        """
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        return self._requests([prompt], params)[0]

    def warm_up(self, *, use_tqdm: bool = True) -> None:
        """Compile what every step can run in, and the rest of the sizes in the background.

        Without it, a size is compiled when it is first needed. `close` ends the background work.
        """
        self.engine.executor.warm_up(use_tqdm=use_tqdm)

    def close(self) -> None:
        """End work in the background; the LLM stays usable."""
        self.engine.close()

    def chat(
        self,
        messages: list,
        sampling_params: SamplingParams | None = None,
        *,
        tools: list[dict] | None = None,
        use_tqdm: bool = True,
        **template_options,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several.

        Args:
            messages: [{"role": ..., "content": ...}, ...], or a list of such lists.
            sampling_params: the same for all; without it, answers may fill the context.
            tools: function descriptions in OpenAI's form.
            use_tqdm: show a bar.
            **template_options: what the chat template takes (`enable_thinking`, ...).

        Raises:
            ValueError: messages that the template refuses, no tokenizer, and as `generate`.
        """
        if not isinstance(messages, list):
            raise ValueError(f"messages={messages!r} is no conversation: give a list of messages.")
        several = messages and isinstance(messages[0], list)
        prompts = [
            self.chat_prompt(conversation, tools=tools, **template_options)
            for conversation in (messages if several else [messages])
        ]
        params = sampling_params or replace(self.default_sampling_params(), max_tokens=None)
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: list[dict], *, tools=None, **template_options) -> dict:
        """The prompt of a conversation: its token ids by the checkpoint's chat template."""
        if self.tokenizer is None:
            raise ValueError(
                "chat needs text, and the checkpoint has no tokenizer: render the conversation "
                "yourself and pass token ids to generate."
            )
        text = render_chat(
            messages,
            template=self.chat_template,
            model_type=self.config.model_type,
            tools=tools,
            tokens=self._template_tokens,
            **template_options,
        )
        return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, else the usual defaults."""
        defaults: dict[str, Any] = dict(self.generation_config.sampling_defaults())
        return SamplingParams(**defaults)

    def _requests(
        self, prompts: list, params: SamplingParams | list[SamplingParams]
    ) -> list[list[Request]]:
        """`n` requests per prompt, all checked before any runs."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts) or not all(isinstance(p, SamplingParams) for p in each):
            raise ValueError(
                f"sampling_params={params!r} do not fit {len(prompts)} prompts: give one "
                "SamplingParams for all, or a list with one for each."
            )
        for one in each:
            one.check_for(self.config.vocab_size, has_tokenizer=self.tokenizer is not None)
        groups = []
        for number, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            ids = self._read_prompt(prompt, f"prompt {number}", generate=1)
            room = self.max_model_len - len(ids)
            limit = room if params.max_tokens is None else min(params.max_tokens, room)
            seed = int(self._rng.integers(2**63)) if params.seed is None else params.seed
            groups.append(
                [
                    Request(
                        ids,
                        params,
                        limit,
                        seed=int(np.random.SeedSequence([seed, i]).generate_state(1)[0]),
                        eos_token_ids=self.eos_token_ids,
                        text=TextStream(self.tokenizer, ids, params) if self.tokenizer else None,
                    )
                    for i in range(params.n)
                ]
            )
        return groups

    def score(
        self,
        prompt: Prompt,
        positions: list[int] | None = None,
        *,
        output: Literal["logits", "logprobs"] = "logits",
        top_logprobs: int = 0,
        max_bytes: int = 2**30,
        use_tqdm: bool = True,
    ) -> np.ndarray | PromptLogprobs:
        """Teacher-forced logits of a prompt, or log-probabilities of its own tokens.

        Args:
            prompt: text or token ids.
            positions: query positions to return (default: all; all but the last for logprobs).
            output: "logits" float32 [positions, vocab], or "logprobs".
            top_logprobs: with "logprobs": how many of the most likely tokens to return beside.
            max_bytes: largest result that is returned, and most of the logits held at a time.
            use_tqdm: show a bar if the prompt takes several steps.

        Raises:
            ValueError: positions outside the prompt, or a result larger than `max_bytes`.
        """
        ids = self._read_prompt(prompt, "the prompt", generate=0)
        return score(self.engine, ids, positions, output, top_logprobs, max_bytes, use_tqdm)

    def explain(
        self, prompt: Prompt, layers: list[int] | None = None, *, use_tqdm: bool = True
    ) -> ExplainReport:
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
        return explain(self.engine, ids, chosen, use_tqdm)

    def _read_prompt(self, prompt: Prompt, name: str, *, generate: int) -> list[int]:
        """Ids of a prompt that leaves room for `generate` tokens."""
        ids = token_ids(prompt, name, self.tokenizer, self.config.vocab_size)
        check_fits(ids, name, self.max_model_len, generate=generate)
        check_forced(self.engine.policy, len(ids), self.engine.group)
        return ids
