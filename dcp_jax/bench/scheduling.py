"""What the scheduler itself takes of a step: planning and taking tokens. Plain Python: no jax."""

import time
from typing import NamedTuple

import numpy as np

from dcp_jax.cache.pages import PagePool
from dcp_jax.engine.request import Request
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.scheduler import Scheduler, SchedulerOptions


class SchedulingTime(NamedTuple):
    """Microseconds per decode step.

    Attributes:
        plan_us: median time of planning.
        apply_us: of taking the tokens.
        total_us: of both.
        p99_us: 99th percentile of both.
    """

    plan_us: float
    apply_us: float
    total_us: float
    p99_us: float


def scheduling_time(
    *,
    running: int = 64,
    steps: int = 1000,
    prompt_tokens: int = 2048,
    page_size: int = 64,
    dcp_size: int = 1,
    decode_steps: int = 1,
) -> SchedulingTime:
    """Time of the scheduler while `running` requests decode, one step ahead of their tokens.

    Pages are allocated and shared as they fill, as in service; there are no devices and no text.

    Args:
        running: requests.
        steps: that are timed.
        prompt_tokens: length of a prompt; each is a token longer than the one before, so that pages
            fill at different times.
        page_size: of the pool.
        dcp_size: likewise.
        decode_steps: tokens per step.
    """
    rng = np.random.default_rng(0)
    limit = decode_steps * (steps + 4)
    params = SamplingParams(temperature=0.0, max_tokens=limit)
    each = -(-(prompt_tokens + running + limit) // (page_size * dcp_size))
    scheduler = Scheduler(
        PagePool(running * each, page_size, dcp_size),
        SchedulerOptions(
            max_running_requests=running,
            chunked_prefill_size=2 * running * (prompt_tokens + running),
            decode_steps=decode_steps,
        ),
    )
    for i in range(running):
        prompt = rng.integers(0, 100_000, prompt_tokens + i).tolist()
        scheduler.add(Request(prompt, params, limit))
    drawn = rng.integers(0, 100_000, (running, decode_steps)).tolist()
    planned, taken, flight = [], [], scheduler.plan()
    for _ in range(steps + 1):
        started = time.perf_counter()
        following = scheduler.plan()
        between = time.perf_counter()
        assert flight is not None
        assert following is not None
        # What a launch gives back; making it is not the scheduler's time.
        rows = flight.decode or flight.chunks
        count = decode_steps if flight.decode else 1
        tokens = {row.request: new[:count] for row, new in zip(rows, drawn, strict=True)}
        applying = time.perf_counter()
        scheduler.apply(flight, tokens)
        planned.append(between - started)
        taken.append(time.perf_counter() - applying)
        flight = following
    # The first step took the prompts.
    times = np.array([planned, taken])[:, 1:] * 1e6
    both = times.sum(0)
    return SchedulingTime(
        *(float(median) for median in np.median(times, 1)),
        total_us=float(np.median(both)),
        p99_us=float(np.percentile(both, 99)),
    )
