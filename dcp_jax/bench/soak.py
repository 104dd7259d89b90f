"""A long mixed run that must leave nothing behind: no compilation, page, thread or array.

Requests of every kind of sampling arrive at random, share prefixes, are aborted at any moment, and
preempt each other where the pool is small. Now and then the engine runs empty, and what it holds
then is compared with what it held the first time.
"""

import resource
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from tqdm.auto import tqdm

from dcp_jax.engine.request import Request
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.llm import LLM

_COMPILED = "/jax/core/compile/backend_compile_duration"
# What requests draw; lengths and seeds differ.
_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.05, logprobs=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, min_tokens=2),
)


@dataclass(frozen=True)
class Held:
    """What the process holds while no request runs.

    Attributes:
        pages: of the pool, neither free nor in the prefix cache.
        arrays: live arrays of jax.
        threads: of Python.
    """

    pages: int
    arrays: int
    threads: int


@dataclass
class SoakReport:
    """Outcome of `soak`.

    Attributes:
        seconds: it took.
        steps: of the engine.
        generated: tokens.
        ended: requests by finish reason.
        preemptions: of running requests.
        failures: launches that failed.
        compiled: programs that the backend compiled.
        held: at every time the engine was empty.
        peak_rss_mib: largest resident memory of the process, at the same times.
    """

    seconds: float = 0.0
    steps: int = 0
    generated: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    failures: int = 0
    compiled: int = 0
    held: list[Held] = field(default_factory=list)
    peak_rss_mib: list[float] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What must not be: one sentence each; empty if all is well."""
        found = []
        if self.compiled:
            found.append(f"{self.compiled} programs were compiled after the warm-up.")
        if self.failures:
            found.append(f"{self.failures} launches failed.")
        first = self.held[0]
        for later in self.held:
            if later.pages:
                found.append(f"{later.pages} pages are held by nobody.")
            if later.arrays > first.arrays:
                found.append(f"{later.arrays} arrays are alive, and {first.arrays} were at first.")
            if later.threads > first.threads:
                found.append(f"{later.threads} threads run, and {first.threads} did at first.")
        return list(dict.fromkeys(found))


def soak(
    llm: LLM, *, seconds: float, rounds: int = 10, seed: int = 0, use_tqdm: bool = True
) -> SoakReport:
    """Run random requests for a time; everything must be compiled (`llm.warm_up`) before.

    Args:
        llm: the model; its engine has no requests.
        seconds: to run, at least.
        rounds: how often the engine runs empty; the first is the one that others are compared with.
        seed: of the requests.
        use_tqdm: show a bar.

    Raises:
        AssertionError: a page is lost or has two owners.
    """
    report, rng = SoakReport(), np.random.default_rng(seed)
    scheduler = llm.engine.scheduler
    ended: Counter[str] = Counter()
    preempted, failed = scheduler.preemptions, llm.engine.failures
    prompts = _Prompts(llm, rng)

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        report.compiled += event == _COMPILED

    jax.monitoring.register_event_duration_secs_listener(listen)
    began = time.perf_counter()
    try:
        with tqdm(total=round(seconds), desc="soak", unit="s", disable=not use_tqdm) as bar:
            for i in range(1, rounds + 1):
                _round(llm, prompts, rng, report, ended, until=began + seconds * i / rounds)
                scheduler.check()
                report.held.append(
                    Held(
                        scheduler.pool.in_use,
                        len(jax.live_arrays()),
                        threading.active_count(),
                    )
                )
                report.peak_rss_mib.append(_peak_rss_mib())
                bar.update(round(seconds * i / rounds) - bar.n)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    report.ended = dict(ended)
    report.seconds = time.perf_counter() - began
    report.preemptions = scheduler.preemptions - preempted
    report.failures = llm.engine.failures - failed
    return report


class _Prompts:
    """Random requests, half of which begin as others do."""

    def __init__(self, llm: LLM, rng: np.random.Generator):
        self._llm, self._rng = llm, rng
        pool = llm.engine.scheduler.pool
        self._longest = min(llm.max_model_len, pool.pages * pool.page_tokens) - 1
        sizes = rng.integers(1, max(self._longest // 2, 2), 8)
        self._common = [self._tokens(size) for size in sizes]

    def request(self) -> Request:
        rng = self._rng
        begins = self._common[rng.integers(len(self._common))] if rng.random() < 0.5 else []
        room = self._longest - len(begins)
        # Most are short, some take what there is.
        prompt = begins + self._tokens(1 + int(room * rng.random() ** 3))
        prompt = prompt[: self._longest]
        kind = _KINDS[rng.integers(len(_KINDS))]
        most = int(rng.integers(1, min(64, self._longest + 2 - len(prompt)) + 1))
        params = replace(
            kind,
            max_tokens=most,
            min_tokens=min(kind.min_tokens, most),
            seed=int(rng.integers(2**31)),
        )
        (request,) = self._llm.requests(prompt, params)
        return request

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self._llm.config.vocab_size, count).tolist()


def _round(
    llm: LLM,
    prompts: _Prompts,
    rng: np.random.Generator,
    report: SoakReport,
    ended: Counter[str],
    *,
    until: float,
) -> None:
    """Requests until a time, then until the engine is empty."""
    engine = llm.engine
    most = 2 * engine.scheduler.options.max_running_requests
    while engine.busy or time.perf_counter() < until:
        live = [*engine.scheduler.running, *engine.scheduler.waiting]
        if time.perf_counter() < until and len(live) < most:
            for _ in range(rng.integers(0, 4)):
                engine.submit(prompts.request())
        if live and rng.random() < 0.02:
            victim = live[rng.integers(len(live))]
            engine.abort(victim)
            ended["abort"] += 1
        step = engine.step()
        report.steps += 1
        report.generated += step.generated
        ended.update(request.finish_reason or "" for request in step.finished)


def _peak_rss_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
