"""From a plan to launches, and from launches back to tokens.

A plan with chunks of prompts and running requests is several launches, back to back: decode rows in
a prefill's shape would be padded to its length, and they meet the cache on a path of their own.
Decode goes first: its tokens are waited for.

Launches run in their order, and that keeps this exact:

* a request that ends is known one step late; its row of the step on its way is dropped, and its
  pages go to others by a later plan only, whose writes come after;
* a launch whose pruned candidates were not certified runs again in full width, then its successor
  runs again too: both write the same rows anew, and nothing of the wrong results is read. Rows of
  requests whose pages the successor's plan gave to others are left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.executor import FROM_SLOT, ChunkRow, DecodeRow, Executor, Launch
from dcp_jax.engine.knobs import knobs_of, sampler_of
from dcp_jax.engine.ladder import SAMPLERS, Sampler
from dcp_jax.engine.paths import parallelism, prefill_options
from dcp_jax.engine.request import Request
from dcp_jax.engine.sampler import Sampled
from dcp_jax.engine.slots import Knobs, default_knobs
from dcp_jax.engine.step_plan import PrefillChunk, StepPlan
from dcp_jax.policy import PrefillPath, PrefillPolicy


@dataclass
class Part:
    """One launch of a plan, and per row: whose it is, how many tokens it draws."""

    launch: Launch
    requests: list[Request]
    draws: list[int]


@dataclass
class Flight:
    """A plan on its way.

    Attributes:
        plan: what was launched.
        parts: its launches, in their order.
        failed: requests whose launch could not be started, with the error.
    """

    plan: StepPlan
    parts: list[Part] = field(default_factory=list)
    failed: list[tuple[list[Request], Exception]] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        """Everybody in it."""
        return [request for part in self.parts for request in part.requests]


@dataclass(frozen=True)
class Drawn:
    """What a request got: its row of numpy arrays [steps, rows], as many steps as it drew."""

    sampled: Sampled
    row: int
    count: int

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return self.sampled.tokens[: self.count, self.row].tolist()


class Launcher:
    """Starts plans on an executor and reads them."""

    def __init__(self, executor: Executor, policy: PrefillPolicy):
        self.executor = executor
        self.policy = policy
        self.group = parallelism(executor.runner.model)
        self._edited: set[int] = set()  # slots whose parameters are not the defaults

    def launch(self, plan: StepPlan, *, afresh: bool = False) -> Flight:
        """Start a plan.

        Args:
            plan: what to run.
            afresh: it was launched before and its results are dropped: what the slots hold does
                not count, and requests that ended since are left out.
        """
        flight = Flight(plan)
        rows, chunks = plan.decode, plan.chunks
        if afresh:
            rows = [row for row in rows if not row.request.finished]
            chunks = [chunk for chunk in chunks if not chunk.request.finished]
        for request in [r.request for r in (*rows, *chunks)] if afresh else plan.admitted:
            self.assign(request, request.slot)
        if rows:
            requests = [row.request for row in rows]
            made = [
                DecodeRow(
                    row.request.slot,
                    FROM_SLOT if row.in_flight and not afresh else row.request.output_token_ids[-1],
                    row.start,
                    row.steps,
                    row.request.pages,
                )
                for row in rows
            ]
            needed = {sampler_of(request.params) for request in requests}
            sampler: Sampler = next(name for name in reversed(SAMPLERS) if name in needed)
            draws = [row.steps for row in rows]
            self._start(flight, requests, draws, lambda: self.executor.decode(made, sampler))
        for batch, path in self._batches(chunks):
            read = [
                ChunkRow(
                    chunk.request.slot,
                    chunk.request.tokens(chunk.start, chunk.start + chunk.length),
                    chunk.start,
                    self._pages(chunk),
                    chunk.last,
                )
                for chunk in batch
            ]
            requests = [chunk.request for chunk in batch]
            draws = [int(chunk.last) for chunk in batch]
            self._start(
                flight,
                requests,
                draws,
                lambda read=read, path=path: self.executor.prefill(read, path),
            )
        return flight

    def read(self, flight: Flight) -> tuple[dict[Request, Drawn], bool]:
        """Wait for a flight: what each request drew, and whether any launch had to run again.

        If so, the flight's successor has read wrong tokens: launch it afresh.
        """
        results = [self.executor.read(part.launch) for part in flight.parts]
        again = False
        for i, (part, (_, certified)) in enumerate(zip(flight.parts, results, strict=True)):
            if certified.all():
                continue
            again = True
            # Those that lost their pages meanwhile draw the same token when they run again.
            gone = [request.slot < 0 for request in part.requests]
            for request in part.requests:
                if request.slot >= 0:
                    self.assign(request, request.slot)
            newest = [(r.output_token_ids or [0])[-1] for r in part.requests]
            part.launch = self.executor.again(part.launch, newest, gone)
            part.draws = [0 if lost else n for n, lost in zip(part.draws, gone, strict=True)]
            results[i] = self.executor.read(part.launch)
        drawn = {
            request: Drawn(sampled, row, count)
            for part, (sampled, _) in zip(flight.parts, results, strict=True)
            for row, (request, count) in enumerate(zip(part.requests, part.draws, strict=True))
        }
        return drawn, again

    def reset(self) -> None:
        """Empty caches and slots."""
        self.executor.reset()
        self._edited.clear()

    def assign(self, request: Request, slot: int) -> None:
        """Load what a slot must know of its request; greedy requests need nothing."""
        params = request.params
        knobs = request_knobs(request)
        if knobs is None:
            knobs = default_knobs() if slot in self._edited else None
            self._edited.discard(slot)
            self.executor.assign(slot, knobs)
            return
        self._edited.add(slot)
        seen = (
            (request.prompt_token_ids, request.output_token_ids) if params.penalised else ((),) * 2
        )
        self.executor.assign(slot, knobs, prompt=seen[0], generated=seen[1])

    def _start(
        self, flight: Flight, requests: list[Request], draws: list[int], launch: Callable
    ) -> None:
        """Add a launch; one that fails may take the caches, and then nothing follows it."""
        if self.executor.runner.cache_deleted:
            return
        try:
            started = launch()
        except Exception as error:
            flight.failed.append((requests, error))
            return
        flight.parts.append(Part(started, requests, draws))

    def _batches(
        self, chunks: list[PrefillChunk]
    ) -> Iterator[tuple[list[PrefillChunk], PrefillPath]]:
        """Chunks that go together, with the path of each batch."""
        executor, ladder = self.executor, self.executor.ladder
        waiting = sorted(chunks, key=lambda chunk: chunk.length, reverse=True)
        while waiting:
            longest = waiting[0].length
            rows, tokens = ladder.chunk(longest)
            batch = [c for c in waiting[:rows] if ladder.chunk(c.length)[1] == tokens]
            path, pages = self._path(batch), max(len(self._pages(c)) for c in batch)
            if executor.rows_together(longest, pages, path) < len(batch):
                batch = batch[:1]
                path = self._path(batch)
            yield batch, path
            waiting = waiting[len(batch) :]

    def _path(self, batch: list[PrefillChunk]) -> PrefillPath:
        how = prefill_options(
            self.policy,
            self.group,
            prefixes=[chunk.start for chunk in batch],
            extends=[chunk.length for chunk in batch],
        )
        return how["path"]

    def _pages(self, chunk: PrefillChunk) -> list[int]:
        """The pages that a chunk reads: those behind it would only be gathered."""
        spec = self.executor.runner.spec
        end = chunk.start + chunk.length
        return chunk.request.pages[: pages_needed(end, spec.page_size, spec.dcp_size)]


def request_knobs(request: Request) -> Knobs | None:
    """What a slot holds of a request; None if all of it is the default.

    Raises:
        ValueError: more edited tokens than a slot holds.
    """
    if sampler_of(request.params) == "greedy":
        return None
    return knobs_of(
        request.params,
        seed=request.seed,
        prompt_tokens=len(request.prompt_token_ids),
        eos_token_ids=request.eos_token_ids,
    )
