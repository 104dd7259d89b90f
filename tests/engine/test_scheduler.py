"""The scheduler's rules, one at a time; tokens are made up."""

import subprocess
import sys
from pathlib import Path

import pytest

from dcp_jax.bench.scheduling import scheduling_time
from dcp_jax.cache.pages import PagePool
from dcp_jax.engine.request import Request
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.scheduler import QueueFull, Scheduler
from dcp_jax.engine.scheduler_options import SchedulerOptions
from dcp_jax.engine.step_plan import StepPlan

ROOT = Path(__file__).parents[2]
PAGE, EOS = 4, 99


def scheduler_of(pages: int = 100, *, rows: int = 8, chunk: int = 64, **options) -> Scheduler:
    return Scheduler(PagePool(pages, PAGE // 2, 2), SchedulerOptions(rows, chunk, **options))


def request_of(prompt: int, limit: int = 8, **fields) -> Request:
    """A prompt of so many tokens that no other prompt begins with."""
    request_of.first += 1000
    tokens = list(range(request_of.first, request_of.first + prompt))
    return Request(tokens, SamplingParams(temperature=0.0), limit, **fields)


request_of.first = 0


def add(scheduler: Scheduler, *requests: Request) -> list[Request]:
    for request in requests:
        scheduler.add(request)
    return list(requests)


def drawn(plan: StepPlan, token: int = 1) -> dict[Request, list[int]]:
    made = {row.request: [token] * row.steps for row in plan.decode}
    return made | {chunk.request: [token] * chunk.last for chunk in plan.chunks}


def step(scheduler: Scheduler, token: int = 1) -> StepPlan:
    """Plan a step and take its tokens at once."""
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, drawn(plan, token))
    scheduler.check()
    return plan


def finish(scheduler: Scheduler) -> int:
    steps = 0
    while scheduler.has_work:
        step(scheduler)
        steps += 1
    assert scheduler.pool.in_use == 0
    return steps


# -- batching ----------------------------------------------------------------------------------


def test_a_long_prompt_does_not_stall_decode():
    scheduler = scheduler_of(chunk=16)
    short, long = request_of(3, 30), request_of(200, 2)
    add(scheduler, short)
    step(scheduler)
    add(scheduler, long)
    read = []
    while not long.output_token_ids:
        plan = step(scheduler)
        assert [row.request for row in plan.decode] == [short]
        read += [chunk.length for chunk in plan.chunks]
    assert read == [15] * 13 + [5]  # the decode row counts, and 200 = 13 * 15 + 5


def test_many_decode_rows_leave_half_of_the_budget_to_prompts():
    scheduler = scheduler_of(rows=13, chunk=4)
    for request in add(scheduler, *(request_of(1, 60) for _ in range(12))):
        while not request.output_token_ids:
            step(scheduler)
    (late,) = add(scheduler, request_of(10, 2))
    lengths = []
    while not late.output_token_ids:
        plan = step(scheduler)
        assert len(plan.decode) == 12
        lengths += [chunk.length for chunk in plan.chunks]
    assert lengths == [2] * 5


def test_prompts_share_a_budget_in_order_of_arrival():
    scheduler = scheduler_of(chunk=10)
    a, b, c = add(scheduler, request_of(6), request_of(8), request_of(3))
    chunks = [(x.request, x.start, x.length, x.last) for x in step(scheduler).chunks]
    assert chunks == [(a, 0, 6, True), (b, 0, 4, False)]
    chunks = [(x.request, x.start, x.length, x.last) for x in step(scheduler).chunks]
    assert chunks == [(b, 4, 4, True), (c, 0, 3, True)]


def test_slots_are_distinct_and_come_back():
    scheduler = scheduler_of(rows=2)
    requests = add(scheduler, *(request_of(3, limit) for limit in (2, 5, 3)))
    step(scheduler)
    assert [request.slot for request in requests] == [0, 1, -1]
    step(scheduler)  # ends the first
    step(scheduler)
    assert [request.slot for request in requests] == [-1, 1, 0]
    finish(scheduler)
    assert [request.slot for request in requests] == [-1] * 3


def test_the_head_of_the_queue_is_not_overtaken():
    """A request that does not fit yet keeps its place before one that would."""
    scheduler = scheduler_of(pages=10)
    large, head, small = add(scheduler, request_of(28, 4), request_of(20, 4), request_of(1, 4))
    for _ in range(4):
        assert step(scheduler).admitted in ([large], [])
    assert large.finished
    assert step(scheduler).admitted == [head, small]


def test_steps_of_a_launch_stop_at_the_limit():
    scheduler = scheduler_of(decode_steps=4)
    (request,) = add(scheduler, request_of(3, 7))
    steps = [[row.steps for row in step(scheduler).decode] for _ in range(3)]
    assert steps == [[], [4], [2]]
    assert request.finish_reason == "length"


# -- one step ahead ----------------------------------------------------------------------------


def test_plans_are_made_before_tokens_are_known():
    scheduler = scheduler_of()
    (request,) = add(scheduler, request_of(3, 3))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    (row,) = second.decode
    assert (row.start, row.steps, row.in_flight) == (3, 1, True)
    scheduler.apply(first, drawn(first, 5))
    third = scheduler.plan()
    assert third is not None
    assert [(row.start, row.in_flight) for row in third.decode] == [(4, True)]
    scheduler.apply(second, drawn(second, 6))
    assert scheduler.plan() is None  # the last token is on its way
    assert scheduler.apply(third, drawn(third, 7)) == [request]
    assert request.output_token_ids == [5, 6, 7]


def test_a_row_of_a_request_that_has_ended_is_dropped():
    scheduler = scheduler_of()
    (request,) = add(scheduler, request_of(4, 9, eos_token_ids=(EOS,)))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    assert scheduler.apply(first, drawn(first, EOS)) == [request]
    scheduler.check()
    assert scheduler.pool.in_use == 0
    assert scheduler.apply(second, drawn(second)) == []
    assert (request.output_token_ids, request.finish_reason) == ([EOS], "stop")
    assert scheduler.pool.tree.size == 1  # the prompt's page, and nothing of the dropped row


def test_an_end_within_the_steps_of_a_launch():
    """Rows after it are not shared."""
    scheduler = scheduler_of(decode_steps=8)
    (request,) = add(scheduler, request_of(5, 20, eos_token_ids=(EOS,)))
    step(scheduler)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, {request: [1, 1, EOS, 1, 1, 1, 1, 1]})
    assert request.output_token_ids == [1, 1, 1, EOS]
    assert scheduler.pool.tree.size == 2  # 8 rows were computed of known tokens, not 13


# -- the prefix cache --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 23])
def test_a_warm_prefix_is_whole_pages(length):
    scheduler = scheduler_of()
    (cold,) = add(scheduler, request_of(length))
    finish(scheduler)
    warm = Request(list(cold.prompt_token_ids), cold.params, 8)
    add(scheduler, warm)
    (chunk,) = step(scheduler).chunks
    cached = (length - 1) // PAGE * PAGE
    assert (cold.cached_tokens, warm.cached_tokens) == (0, cached)
    assert (chunk.start, chunk.length) == (cached, length - cached)
    finish(scheduler)


def test_conversations_that_began_together_are_all_found_again():
    """The second one's answer is shared, though the first one's prompt is in the tree."""
    scheduler = scheduler_of()
    first = request_of(9, 12)
    second = Request(list(first.prompt_token_ids), first.params, 12)
    add(scheduler, first, second)
    tokens = {first: 1, second: 2}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, {r: [tokens[r]] * len(new) for r, new in drawn(plan).items()})
        scheduler.check()
    for request in (first, second):
        following = Request([*request.token_ids, 7, 8], request.params, 2)
        add(scheduler, following)
        finish(scheduler)
        assert following.cached_tokens == (request.length - 1) // PAGE * PAGE


def test_salted_requests_share_with_their_own_only():
    scheduler = scheduler_of()
    cached = []
    for salt in ("", "a", "a", "b", ""):
        (request,) = add(scheduler, Request([3] * 9, SamplingParams(), 1, cache_salt=salt))
        finish(scheduler)
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 8, 0, 8]


# -- a full pool -------------------------------------------------------------------------------


def test_the_latest_gives_way_and_returns_first():
    scheduler = scheduler_of(pages=5)
    old, late, last = add(scheduler, request_of(7, 10), request_of(7, 5), request_of(7, 2))
    for _ in range(3):
        step(scheduler)
    assert scheduler.preemptions == 1
    assert list(scheduler.waiting) == [late, last]
    assert late.output_token_ids == [1, 1]
    assert late.pages == []
    while not old.finished:
        assert step(scheduler).admitted == []
    plan = step(scheduler)
    assert plan.admitted == [late, last]
    chunk = plan.chunks[0]  # its first page was still cached
    assert (chunk.request, chunk.start, chunk.length, chunk.last) == (late, 4, 5, True)
    finish(scheduler)
    assert [len(request.output_token_ids) for request in (old, late, last)] == [10, 5, 2]
    assert late.cached_tokens == 0  # what its prompt found at first


def test_a_token_on_its_way_survives_preemption():
    scheduler = scheduler_of(pages=4)
    old, late = add(scheduler, request_of(7, 9), request_of(6, 9))
    flight = scheduler.plan()
    while not scheduler.preemptions:
        following = scheduler.plan()
        assert flight is not None
        scheduler.apply(flight, drawn(flight))
        flight = following
    assert len(late.output_token_ids) == late.length - 6
    assert flight is not None
    assert late not in [row.request for row in flight.decode]
    scheduler.apply(flight, drawn(flight))
    finish(scheduler)
    assert (old.output_token_ids, late.output_token_ids) == ([1] * 9, [1] * 9)


def test_one_that_needs_the_whole_pool_gets_it():
    scheduler = scheduler_of(pages=4)
    others = [request_of(5, 6) for _ in range(2)]
    whole = request_of(10, 7)
    requests = add(scheduler, others[0], whole, others[1])
    finish(scheduler)
    assert [request.finish_reason for request in requests] == ["length"] * 3


def test_a_queue_that_waits_is_not_matched_at_every_step(monkeypatch):
    """Nothing is looked up for the head until pages come back."""
    scheduler = scheduler_of(pages=6)
    add(scheduler, request_of(16, 8), request_of(16, 2))
    looked = []
    match = scheduler.pool.tree.match
    monkeypatch.setattr(
        scheduler.pool.tree, "match", lambda *args: looked.append(args) or match(*args)
    )
    finish(scheduler)
    assert len(looked) == 3  # the first; the second twice


# -- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("ahead", [False, True])
def test_abort_at_any_moment(steps, ahead):
    scheduler = scheduler_of(chunk=4)
    request, other = add(scheduler, request_of(10, 3), request_of(5, 4))
    for _ in range(steps):
        step(scheduler)
    flight = scheduler.plan() if ahead and scheduler.has_work else None
    ended = request.finish_reason
    scheduler.abort(request)
    scheduler.check()
    assert request.finish_reason == (ended or "abort")
    assert request not in scheduler.running
    assert request not in scheduler.waiting
    got = list(request.output_token_ids)
    if flight is not None:
        scheduler.apply(flight, drawn(flight))
    finish(scheduler)
    assert request.output_token_ids == got
    assert len(other.output_token_ids) == 4


def test_a_request_that_failed_shares_nothing_new():
    scheduler = scheduler_of()
    (request,) = add(scheduler, request_of(9))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.fail(request, RuntimeError("a launch"))
    scheduler.apply(plan, drawn(plan))
    assert (request.finish_reason, str(request.error)) == ("error", "a launch")
    assert request.output_token_ids == []
    assert scheduler.pool.tree.size == 0
    assert scheduler.pool.available == 100


def test_lost_caches_start_everything_again():
    scheduler = scheduler_of()
    requests = add(scheduler, request_of(9), request_of(9))
    step(scheduler)
    scheduler.preempt_all()
    scheduler.check()
    assert scheduler.pool.allocator.available == 100
    plan = step(scheduler)
    assert [(c.request, c.start, c.length) for c in plan.chunks] == [(r, 0, 10) for r in requests]
    finish(scheduler)
    assert [request.output_token_ids for request in requests] == [[1] * 8] * 2


def test_pages_reserved_outside():
    scheduler = scheduler_of(pages=4)
    pages = scheduler.reserve(9)
    assert pages is not None
    assert len(pages) == 3
    scheduler.check()
    assert scheduler.reserve(5) is None
    add(scheduler, request_of(6, 2))
    assert scheduler.plan() is None
    scheduler.release(pages)
    finish(scheduler)


# -- refusals ----------------------------------------------------------------------------------


def test_a_full_queue():
    scheduler = scheduler_of(rows=1, max_queued_requests=2)
    add(scheduler, request_of(3, 2), request_of(3, 2))
    with pytest.raises(QueueFull, match="2 requests wait already: try again later, or raise"):
        scheduler.add(request_of(3, 2))
    step(scheduler)
    add(scheduler, request_of(3, 2))
    finish(scheduler)


@pytest.mark.parametrize(("prompt", "limit", "fits"), [(9, 8, True), (9, 9, False), (17, 1, False)])
def test_what_never_fits_is_refused_at_once(prompt, limit, fits):
    scheduler = scheduler_of(pages=4)
    if fits:
        add(scheduler, request_of(prompt, limit))
        finish(scheduler)
        return
    with pytest.raises(ValueError, match="17 tokens needs 5 pages and the pool has 4: shorten it"):
        scheduler.add(request_of(prompt, limit))


def test_a_request_runs_once():
    scheduler = scheduler_of()
    added, aborted = request_of(3), request_of(3)
    add(scheduler, added)
    scheduler.abort(aborted)
    for request in (added, aborted):
        with pytest.raises(ValueError, match="submitted or aborted before: make a new one"):
            scheduler.add(request)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running_requests", 0),
        ("chunked_prefill_size", 1.5),
        ("decode_steps", True),
        ("max_queued_requests", -1),
    ],
)
def test_options_that_are_no_counts(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not a count: give a whole number"):
        SchedulerOptions(**{name: value})


# -- speed -------------------------------------------------------------------------------------


def test_a_step_of_64_requests_takes_under_300_microseconds():
    """Without the checks of types that tests run with; the best of a few, for a busy machine."""
    code = """
from dcp_jax.bench.scheduling import scheduling_time
print(min(scheduling_time(steps=100).total_us for _ in range(3)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 0 < float(run.stdout) < 300


def test_time_per_step_adds_up():
    time = scheduling_time(running=4, steps=20, prompt_tokens=8, page_size=4, decode_steps=2)
    assert max(time.plan_us, time.apply_us) < time.total_us <= time.p99_us
