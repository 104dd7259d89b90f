"""The loop over steps: admit requests while pages last, prefill in chunks, decode all together."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from dcp_jax.cache.allocator import PageAllocator
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.logprobs import SCORED_CHUNK, prompt_logprobs, token_logprobs
from dcp_jax.engine.paths import parallelism, prefill_options
from dcp_jax.engine.runner import Row, Runner, StepResult
from dcp_jax.engine.sampler import Sampling
from dcp_jax.engine.sampling_batch import sampling_of
from dcp_jax.engine.sequence import Sequence
from dcp_jax.policy import PrefillPath, PrefillPolicy


class Chunk(NamedTuple):
    """One step of a prefill: positions start..start+length-1 of the prompt."""

    start: int
    length: int
    path: PrefillPath
    result: StepResult


class Progress(NamedTuple):
    """What a step added: prompt tokens read, tokens generated, requests finished."""

    prefilled: int = 0
    generated: int = 0
    finished: int = 0


class Engine:
    """Runs sequences to their end on one runner.

    Pages for a whole request are reserved when it is admitted, so a running request never waits.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        policy: PrefillPolicy,
        max_running_requests: int,
        chunked_prefill_size: int,
    ):
        self.runner = runner
        self.allocator = PageAllocator(runner.spec.pages)
        self.policy = policy
        self.group = parallelism(runner.model)
        self.max_running_requests = max_running_requests
        self.chunked_prefill_size = chunked_prefill_size

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence take."""
        return pages_needed(tokens, self.runner.spec.page_size, self.runner.dcp_size)

    def run(self, sequences: list[Sequence]) -> Iterator[Progress]:
        """Run to the end, in order of the list, one step per item.

        Pages are given back whatever happens: an interrupted or abandoned run leaves the engine
        usable.
        """
        waiting, running, need = deque(sequences), [], 0
        lost = self.runner.caches_lost
        try:
            while waiting or running:
                if self.runner.caches_lost != lost:
                    raise RuntimeError(
                        "another call was interrupted inside a step and the caches are lost: start "
                        "this one again."
                    )
                if waiting and len(running) < self.max_running_requests:
                    need = self.pages_for(self._final_length(waiting[0]))
                    if need <= self.allocator.available:
                        sequence = waiting.popleft()
                        sequence.pages = self.allocator.allocate(need)
                        running.append(sequence)
                        yield from self._prefill(sequence)
                        yield Progress(generated=1, finished=self._retire(running))
                        continue
                if not running:
                    raise ValueError(
                        f"a request needs {need} pages and {self.allocator.available} are free: "
                        "finish or close the streams that hold the others."
                    )
                generated = len(running)
                self._decode(running)
                yield Progress(generated=generated, finished=self._retire(running))
        finally:
            for sequence in running:
                self._release(sequence)

    def prefill_chunks(
        self,
        tokens: list[int],
        pages: list[int],
        *,
        chunk: int | None = None,
        last_sampling: Sampling | None = None,
        **changes,
    ) -> Iterator[Chunk]:
        """Prefill chunk by chunk.

        Args:
            tokens: the prompt.
            pages: its pages.
            chunk: take fewer tokens at a time than `chunked_prefill_size`.
            last_sampling: how the last chunk draws the next token; None takes the most likely.
            **changes: fields of `StepOptions`.
        """
        size = min(self.chunked_prefill_size, chunk or self.chunked_prefill_size)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            how = prefill_options(self.policy, self.group, [start], [len(part)])
            sampling = last_sampling if start + len(part) == len(tokens) else None
            # The dense path gathers every page of its table: none that later chunks will fill.
            dense = how["path"] is PrefillPath.MHA_ONE_SHOT
            table = pages[: self.pages_for(start + len(part))] if dense else pages
            row = Row(part, start, table)
            result = self.runner.step([row], sampling=sampling, **how, **changes)
            yield Chunk(start, len(part), how["path"], result)

    def reserve(self, tokens: int) -> list[int]:
        """Pages for a prompt that is only read (score, explain); give them back with `free`."""
        return self.allocator.allocate(self.pages_for(tokens))

    def _prefill(self, sequence: Sequence) -> Iterator[Progress]:
        """Read the prompt and draw the first token with its last chunk."""
        prompt, scored = sequence.prompt_token_ids, sequence.params.prompt_logprobs
        if scored is not None:
            sequence.prompt_logprobs.append(None)
            chunks = self.prefill_chunks(prompt, sequence.pages, chunk=SCORED_CHUNK, logits="all")
            for chunk in chunks:
                sequence.prompt_logprobs += prompt_logprobs(chunk, prompt, scored)
                yield Progress(prefilled=chunk.length)
            # The last token is read again, now to draw from: its row is rewritten with itself.
            self._advance([sequence], [Row(prompt[-1:], len(prompt) - 1, sequence.pages)])
            return
        sampling = sampling_of([sequence])
        for chunk in self.prefill_chunks(prompt, sequence.pages, last_sampling=sampling):
            yield Progress(prefilled=chunk.length)
            if chunk.start + chunk.length == len(prompt):
                _take([sequence], chunk.result)

    def _decode(self, running: list[Sequence]) -> None:
        rows = [Row(s.output_token_ids[-1:], s.cached_tokens, s.pages) for s in running]
        self._advance(running, rows)

    def _advance(self, sequences: list[Sequence], rows: list[Row]) -> None:
        _take(sequences, self.runner.step(rows, sampling=sampling_of(sequences)))

    def _retire(self, running: list[Sequence]) -> int:
        """Take finished sequences out of `running` and give back their pages; how many."""
        finished = [s for s in running if s.finish_reason is not None]
        running[:] = [s for s in running if s.finish_reason is None]
        for sequence in finished:
            self._release(sequence)
        return len(finished)

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.pages)
        sequence.pages = []

    def _final_length(self, sequence: Sequence) -> int:
        """Tokens in the cache at the end: the last generated one is never written."""
        return len(sequence.prompt_token_ids) + sequence.limit - 1


def _take(sequences: list[Sequence], result: StepResult) -> None:
    """Append a step's tokens, with their log-probabilities where asked for."""
    for row, (sequence, token) in enumerate(zip(sequences, result.next_tokens, strict=True)):
        if sequence.params.logprobs is not None:
            sequence.logprobs.append(token_logprobs(result, row, sequence.params.logprobs))
        sequence.append(token)
