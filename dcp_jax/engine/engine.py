"""The loop over steps: admit requests while pages last, prefill in chunks, decode all together."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dcp_jax.cache.allocator import PageAllocator
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.runner import Row, Runner, StepResult
from dcp_jax.engine.sequence import Sequence
from dcp_jax.layers.sizes import Sizes
from dcp_jax.mesh import tp_size
from dcp_jax.policy import PrefillPath, PrefillPolicy, choose_path


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
        eos_token_ids: tuple[int, ...],
        max_running_requests: int,
        chunked_prefill_size: int,
    ):
        self.runner = runner
        self.allocator = PageAllocator(runner.spec.pages)
        self.policy = policy
        self.eos_token_ids = eos_token_ids
        self.max_running_requests = max_running_requests
        self.chunked_prefill_size = chunked_prefill_size

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence take."""
        return pages_needed(tokens, self.runner.spec.page_size, self.runner.dcp_size)

    def run(self, sequences: list[Sequence], on_step: Callable[[Progress], None]) -> None:
        """Run to the end, in order of the list; `on_step` hears of every step.

        Pages are given back whatever happens, so an interrupted call leaves the engine usable.
        """
        waiting, running = deque(sequences), []
        try:
            while waiting or running:
                if waiting and len(running) < self.max_running_requests:
                    need = self.pages_for(self._final_length(waiting[0]))
                    if need <= self.allocator.available:
                        sequence = waiting.popleft()
                        sequence.pages = self.allocator.allocate(need)
                        running.append(sequence)
                        self._prefill(sequence, on_step)
                        running = self._retire(running, 1, on_step)
                        continue
                self._decode(running)
                running = self._retire(running, len(running), on_step)
        finally:
            for sequence in running:
                self._release(sequence)

    def prefill_chunks(
        self, tokens: list[int], pages: list[int], *, chunk: int | None = None, **changes
    ) -> Iterator[Chunk]:
        """Prefill chunk by chunk.

        Args:
            tokens: the prompt.
            pages: its pages.
            chunk: take fewer tokens at a time than `chunked_prefill_size`.
            **changes: fields of `StepOptions`.
        """
        size = min(self.chunked_prefill_size, chunk or self.chunked_prefill_size)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            path = self._path(start, len(part))
            result = self.runner.step([Row(part, start, pages)], path=path, **changes)
            yield Chunk(start, len(part), path, result)

    def reserve(self, tokens: int) -> list[int]:
        """Pages for a prompt that is only read (score, explain); give them back with `free`."""
        return self.allocator.allocate(self.pages_for(tokens))

    def _path(self, prefix_tokens: int, extend_tokens: int) -> PrefillPath:
        if self.runner.dcp_size == 1:
            return PrefillPath.OWNED  # one rank owns every row: both paths are the same program
        model = self.runner.model
        tp = tp_size(model.mesh)
        heads = Sizes.padded(model.cfg, tp).heads * self.runner.dcp_size // tp
        return choose_path(
            self.policy,
            prefix_tokens=prefix_tokens,
            extend_tokens=extend_tokens,
            gathered_heads=heads,
        )

    def _prefill(self, sequence: Sequence, on_step: Callable[[Progress], None]) -> None:
        token = -1
        for chunk in self.prefill_chunks(sequence.prompt_token_ids, sequence.pages):
            on_step(Progress(prefilled=chunk.length))
            (token,) = chunk.result.next_tokens
        sequence.append(token, self.eos_token_ids)

    def _decode(self, running: list[Sequence]) -> None:
        rows = [Row(s.output_token_ids[-1:], s.cached_tokens, s.pages) for s in running]
        for sequence, token in zip(running, self.runner.step(rows).next_tokens, strict=True):
            sequence.append(token, self.eos_token_ids)

    def _retire(self, running: list[Sequence], tokens: int, on_step) -> list[Sequence]:
        """Give back the pages of finished sequences, report progress, return the others."""
        still = [s for s in running if s.finish_reason is None]
        for sequence in running:
            if sequence.finish_reason is not None:
                self._release(sequence)
        on_step(Progress(generated=tokens, finished=len(running) - len(still)))
        return still

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.pages)
        sequence.pages = []

    def _final_length(self, sequence: Sequence) -> int:
        """Tokens in the cache at the end: the last generated one is never written."""
        return len(sequence.prompt_token_ids) + sequence.limit - 1
