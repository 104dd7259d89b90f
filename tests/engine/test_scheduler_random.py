"""Random service on a device without a model, which notices every row that is not as it should be.

What the device draws is a function of the whole prefix that it finds in its pool: a prefix that is
mixed up, a row read after its page went to another, a row never written all end the test. Launches
run in their order, as on real devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from dcp_jax.cache.pages import PagePool
from dcp_jax.engine.request import Request
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.scheduler import Scheduler
from dcp_jax.engine.scheduler_options import SchedulerOptions
from dcp_jax.engine.step_plan import DecodeRow, PrefillChunk, StepPlan

VOCAB, EOS = 30, 7
WORD, FACTOR = 2**64, 0x9E3779B97F4A7C15
GREEDY = SamplingParams(temperature=0.0)


def mixed(before: int, token: int) -> int:
    """Hash of a prefix and one more token."""
    product = (before ^ (token + 1)) * FACTOR % WORD
    return product ^ product >> 29


def alone(request: Request) -> list[int]:
    """What a request generates by itself."""
    prefix, out = 0, []
    for token in request.prompt_token_ids:
        prefix = mixed(prefix, token)
    while len(out) < request.limit and not set(out) & set(request.eos_token_ids):
        out.append(prefix % VOCAB)
        prefix = mixed(prefix, out[-1])
    return out


@dataclass
class Row:
    """What a launch was given of a request, and what it drew."""

    planned: DecodeRow | PrefillChunk
    slot: int
    tokens: Sequence[int] | None  # None: the slot's newest
    table: np.ndarray
    drawn: list[int] = field(default_factory=list)


@dataclass
class Flight:
    plan: StepPlan
    rows: list[Row]
    wrong: bool


class FakeDevice:
    """A pool whose slots hold position, token and prefix hash; newest tokens and tables by slot."""

    def __init__(self, scheduler: Scheduler):
        self.pool, slots = scheduler.pool, scheduler.options.max_running_requests
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.newest = [-1] * slots
        self.wasted = 0
        self.reset()

    def reset(self) -> None:
        size = self.pool.pages * self.pool.page_tokens
        self.position = np.full(size, -1)
        self.token = np.zeros(size, np.uint64)
        self.prefix = np.zeros(size, np.uint64)

    def launch(self, plan: StepPlan, *, wrong: bool = False, afresh: bool = False) -> Flight:
        """Run a plan; `wrong`: other tokens are drawn, which `read` finds out."""
        planned = [*plan.decode, *plan.chunks]
        if afresh:
            planned = [row for row in planned if not row.request.finished]
        for request in [row.request for row in planned] if afresh else plan.admitted:
            self.tables[request.slot], self.newest[request.slot] = [], -1
        rows = [self._row(row, afresh) for row in planned]
        assert len({row.slot for row in rows}) == len(rows)
        for row in rows:
            self._run(row, wrong)
        return Flight(plan, rows, wrong)

    def read(self, flight: Flight) -> dict[Request, list[int]]:
        """What each request drew; a flight that drew wrong tokens runs again."""
        rows = flight.rows
        if flight.wrong:
            # Of those that lost their pages meanwhile nothing is written, and nothing is drawn.
            rows = [row for row in rows if row.planned.request.slot >= 0]
            for row in rows:
                if isinstance(row.planned, DecodeRow):
                    row.tokens = row.planned.request.output_token_ids[-1:]
                self._run(row, wrong=False)
        self.wasted += sum(len(row.drawn) for row in rows if row.planned.request.finished)
        return {row.planned.request: row.drawn for row in rows}

    def _row(self, row: DecodeRow | PrefillChunk, afresh: bool) -> Row:
        request = row.request
        table = self.tables[request.slot]
        table += request.pages[len(table) :]
        assert table == request.pages
        if isinstance(row, PrefillChunk):
            tokens = request.tokens(row.start, row.start + row.length)
            assert len(tokens) == row.length
        else:
            tokens = None if row.in_flight and not afresh else request.output_token_ids[-1:]
        return Row(row, request.slot, tokens, np.array(table))

    def _run(self, row: Row, wrong: bool) -> None:
        planned, row.drawn = row.planned, []
        prefix = self._read_prefix(row)
        tokens = [self.newest[row.slot]] if row.tokens is None else row.tokens
        assert min(tokens) >= 0
        if isinstance(planned, PrefillChunk):
            prefix = self._write(row, planned.start, tokens, prefix)
            if not planned.last:
                return
            row.drawn = [(prefix + wrong) % VOCAB]
        else:
            newest = tokens[0]
            for step in range(planned.steps):
                prefix = self._write(row, planned.start + step, [newest], prefix)
                newest = (prefix + wrong) % VOCAB
                row.drawn.append(newest)
        self.newest[row.slot] = row.drawn[-1]

    def _slots(self, row: Row, positions: np.ndarray) -> np.ndarray:
        size = self.pool.page_tokens
        return row.table[positions // size] * size + positions % size

    def _read_prefix(self, row: Row) -> int:
        """Hash of the tokens before a row, all of them checked."""
        if not row.planned.start:
            return 0
        positions = np.arange(row.planned.start)
        slots = self._slots(row, positions)
        token, prefix = self.token[slots], self.prefix[slots]
        assert (self.position[slots] == positions).all(), "a row that is not there"
        known = row.planned.request.tokens(0, row.planned.start)
        assert token[: len(known)].tolist() == known, "another prefix"
        before = np.concatenate([np.zeros(1, np.uint64), prefix[:-1]])
        product = (before ^ (token + np.uint64(1))) * np.uint64(FACTOR)
        assert (prefix == product ^ product >> np.uint64(29)).all(), "a stale row"
        return int(prefix[-1])

    def _write(self, row: Row, start: int, tokens: Sequence[int], prefix: int) -> int:
        positions = np.arange(start, start + len(tokens))
        slots = self._slots(row, positions)
        shared = {node.page for node in self.pool.tree.nodes()}
        assert shared.isdisjoint((slots // self.pool.page_tokens).tolist()), "a shared page written"
        self.position[slots] = positions
        for slot, token in zip(slots, tokens, strict=True):
            prefix = mixed(prefix, token)
            self.token[slot], self.prefix[slot] = token, prefix
        return prefix


@dataclass(frozen=True)
class Service:
    """How requests come, and what goes wrong; chances are per step."""

    lag: int = 1
    decode_steps: int = 1
    share: bool = True
    abort: float = 0.0
    wrong: float = 0.0
    lose: float = 0.0


ROWS, CHUNK, PAGE = 8, 16, 4


def random_requests(count: int, rng: np.random.Generator) -> list[Request]:
    """Prompts of one token to a dozen pages that begin like others do."""
    stems: list[list[int]] = [[]]
    for _ in range(12):
        parent = stems[rng.integers(len(stems))]
        stems.append(parent[:24] + rng.integers(0, VOCAB, rng.integers(1, 3 * PAGE)).tolist())
    made = []
    for _ in range(count):
        end = rng.integers(0, VOCAB, rng.integers(1, 2 * PAGE)).tolist()
        prompt = stems[rng.integers(len(stems))] + end
        limit, ends = int(rng.integers(1, 20)), (EOS,) if rng.random() < 0.5 else ()
        made.append(Request(prompt, GREEDY, limit, eos_token_ids=ends))
    return made


def serve(scheduler: Scheduler, requests: list[Request], service: Service, rng) -> FakeDevice:
    """The engine's step, again and again, with everything that can come between."""
    device, arriving, flight = FakeDevice(scheduler), list(requests), None
    options, steps = scheduler.options, 0

    def interrupt() -> None:
        if rng.random() < service.abort and len(arriving) < len(requests):
            came = len(requests) - len(arriving)
            scheduler.abort(requests[rng.integers(max(came - 2 * ROWS, 0), came)])
            scheduler.check()

    while arriving or scheduler.has_work or flight:
        steps += 1
        assert steps < 100 * len(requests), "nothing ends"
        for _ in range(rng.integers(0, 3)):
            if arriving:
                scheduler.add(arriving.pop(0))
        if rng.random() < service.lose:
            flight = None
            scheduler.preempt_all()
            device.reset()
            assert scheduler.pool.available == scheduler.pool.pages
        interrupt()
        plan = scheduler.plan()
        scheduler.check()
        launched = None
        if plan is not None:
            check_plan(plan, scheduler)
            launched = device.launch(plan, wrong=rng.random() < service.wrong)
        interrupt()
        landing, flight = (flight, launched) if service.lag else (launched, None)
        if landing is not None:
            scheduler.apply(landing.plan, device.read(landing))
            if landing.wrong and flight is not None:
                flight = device.launch(flight.plan, afresh=True)
        scheduler.check()
        assert len(scheduler.running) <= options.max_running_requests
    return device


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """A token budget for prompts; whoever can decode does."""
    budget = scheduler.options.chunked_prefill_size
    read = sum(chunk.length for chunk in plan.chunks)
    assert read <= budget
    assert all(1 <= row.steps <= scheduler.options.decode_steps for row in plan.decode)
    planned = {row.request for row in (*plan.decode, *plan.chunks)}
    assert set(plan.admitted) <= planned <= set(scheduler.running)
    for request in set(scheduler.running) - planned:
        if request.launched < request.length - 1:
            assert read >= budget // 2, "a prompt waits though the budget is not spent"
        else:
            assert len(request.output_token_ids) + request.pending == request.limit


SERVICES = {
    "read at once": Service(lag=0),
    "one step ahead": Service(),
    "four steps a launch, at once": Service(lag=0, decode_steps=4),
    "four steps a launch": Service(decode_steps=4),
    "aborts": Service(abort=0.3),
    "aborts, four steps a launch": Service(abort=0.3, decode_steps=4),
    "nothing shared": Service(share=False, abort=0.1),
    "launched again": Service(wrong=0.3, abort=0.2),
    "launched again, four steps": Service(wrong=0.3, abort=0.2, decode_steps=4),
    "lost caches": Service(lose=0.05, wrong=0.1, abort=0.1, decode_steps=2),
}


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_1000_requests_equal_each_alone(service: Service):
    """In a pool of a quarter of the working set."""
    rng = np.random.default_rng(list(SERVICES.values()).index(service))
    requests = random_requests(1000, rng)
    needs = sorted(-(-request.most_tokens // PAGE) for request in requests)
    pages = max(sum(needs[-ROWS:]) // 4, needs[-1])
    scheduler = Scheduler(
        PagePool(pages, PAGE // 2, 2, share=service.share),
        SchedulerOptions(ROWS, CHUNK, service.decode_steps),
    )
    device = serve(scheduler, requests, service, rng)
    aborted = 0
    for request in requests:
        want = alone(request)
        if request.finish_reason == "abort":
            aborted += 1
            assert request.output_token_ids == want[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == want
            stopped = want[-1] in request.eos_token_ids
            assert request.finish_reason == ("stop" if stopped else "length")
    assert scheduler.preemptions > 40
    assert (aborted > 50) == (service.abort > 0)
    assert (device.wasted > 20) == (service.lag > 0)
    assert any(request.cached_tokens for request in requests) == service.share
    assert scheduler.pool.in_use == 0
