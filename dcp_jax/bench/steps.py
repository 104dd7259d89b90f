"""Where the time of a decode step goes: scheduler, dispatch, devices, readback."""

import time
from dataclasses import dataclass
from statistics import median

import jax
import numpy as np

from dcp_jax.bench.scheduling import scheduling_time
from dcp_jax.engine.executor import FROM_SLOT, DecodeRow
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.llm import LLM


@dataclass(frozen=True)
class StepTimes:
    """Microseconds per decode step; medians.

    Attributes:
        running: requests in each step.
        context: tokens of each at the beginning.
        decode_steps: tokens per launch.
        leaves: arrays that a launch is given; dispatch grows with them.
        scheduler_alone: planning and taking tokens, measured without devices or text.
        schedule, take: the same inside the engine (take: with log-probabilities and stops).
        dispatch: starting a launch, until the host goes on.
        device: a launch on the devices, when nothing waits for the host.
        readback: copying the tokens of a launch that is over.
        wait: what the engine waited for tokens; 0 where the host is the slower.
        step: the whole step of the engine.
    """

    running: int
    context: int
    decode_steps: int
    leaves: int
    scheduler_alone: float
    schedule: float
    take: float
    dispatch: float
    device: float
    readback: float
    wait: float
    step: float


def step_times(llm: LLM, *, running: int, context: int, steps: int = 100) -> StepTimes:
    """Measure decode steps of `running` requests of `context` tokens each, `steps` times.

    Raises:
        ValueError: more requests than slots, or tokens than the pool or the context hold.
    """
    executor = llm.engine.executor
    drawn = (steps + 2) * executor.decode_steps
    _check(llm, running, context, drawn)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, llm.config.vocab_size, (running, context)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=drawn, ignore_eos=True)
    requests = [request for prompt in prompts for request in llm.requests(prompt, params)]
    for request in requests:
        llm.engine.submit(request)
    times, whole = [], []
    try:
        while llm.engine.busy:
            started = time.perf_counter()
            report = llm.engine.step()
            ended = time.perf_counter()
            decoded = [rows for name, rows, _ in report.launched if name.startswith("decode")]
            if decoded == [running] and len(report.launched) == 1:
                times.append(report.times)
                whole.append(ended - started)
                if len(whole) == steps:
                    break
        dispatch, device, readback = _launches(llm, requests, steps)
    finally:
        for request in requests:
            llm.engine.abort(request)
        while llm.engine.busy:
            llm.engine.step()
    alone = scheduling_time(
        running=running,
        prompt_tokens=context,
        page_size=llm.engine.runner.spec.page_size,
        dcp_size=llm.engine.runner.dcp_size,
        decode_steps=executor.decode_steps,
    )
    micro = 1e6
    return StepTimes(
        running=running,
        context=context,
        decode_steps=executor.decode_steps,
        leaves=len(jax.tree.leaves((executor.params, llm.engine.runner.cache))) + 3,
        scheduler_alone=alone.total_us,
        schedule=median(t.schedule for t in times) * micro,
        take=median(t.take for t in times) * micro,
        dispatch=dispatch * micro,
        device=device * micro,
        readback=readback * micro,
        wait=median(t.wait for t in times) * micro,
        step=median(whole) * micro,
    )


def _launches(llm: LLM, requests: list, steps: int) -> tuple[float, float, float]:
    """Seconds of (dispatch, device, readback) of a launch of these running requests.

    It is the one on its way, again and again: nobody has read its rows yet.
    """
    executor = llm.engine.executor
    rows = [
        DecodeRow(
            r.slot, FROM_SLOT, r.launched - executor.decode_steps, executor.decode_steps, r.pages
        )
        for r in requests
    ]
    executor.read(executor.decode(rows, "greedy"))
    dispatches, readbacks, launch = [], [], None
    began = time.perf_counter()
    for _ in range(steps):
        started = time.perf_counter()
        launch = executor.decode(rows, "greedy")
        dispatches.append(time.perf_counter() - started)
    jax.block_until_ready(launch.drawn if launch else None)
    device = (time.perf_counter() - began) / steps
    for _ in range(steps):
        launch = executor.decode(rows, "greedy")
        jax.block_until_ready(launch.drawn)
        started = time.perf_counter()
        executor.read(launch)
        readbacks.append(time.perf_counter() - started)
    return median(dispatches), device, median(readbacks)


def _check(llm: LLM, running: int, context: int, drawn: int) -> None:
    scheduler = llm.engine.scheduler
    slots = scheduler.options.max_running_requests
    if running > slots:
        raise ValueError(
            f"running={running} is more than max_running_requests={slots}: raise that, or lower it."
        )
    if context + drawn > llm.max_model_len:
        raise ValueError(
            f"context={context} and {drawn} tokens to generate do not fit max_model_len="
            f"{llm.max_model_len}: lower context or steps."
        )
    pages = running * scheduler.pool.needed(context + drawn)
    if pages > scheduler.pool.pages:
        raise ValueError(
            f"{running} requests of {context + drawn} tokens need {pages} pages and the pool has "
            f"{scheduler.pool.pages}: lower running, context or steps, or raise max_total_tokens."
        )
