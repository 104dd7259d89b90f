"""The engine: requests go in, each step adds tokens to some of them.

A step launches the scheduler's next plan, then reads the results of the one before: while the host
works on tokens, the devices work on the next ones.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_jax.engine.errors import StepError, step_error
from dcp_jax.engine.executor import Executor
from dcp_jax.engine.launcher import Drawn, Flight, Launcher, request_knobs
from dcp_jax.engine.logprobs import SCORED_CHUNK, prompt_logprobs, token_logprobs
from dcp_jax.engine.paths import parallelism
from dcp_jax.engine.reading import read_prompt
from dcp_jax.engine.request import Request
from dcp_jax.engine.scheduler import Scheduler
from dcp_jax.policy import PrefillPolicy

logger = logging.getLogger(__name__)


class Times(NamedTuple):
    """Seconds of a step on the host: plan, launch, wait for the step before, take its tokens."""

    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    take: float = 0.0


@dataclass
class StepReport:
    """What one call of `Engine.step` did.

    Attributes:
        prefilled: prompt tokens read by the launches it started.
        generated: tokens that requests got.
        updated: requests that got tokens or ended.
        finished: those of them that ended.
        launched: (name of the bucket, rows, new tokens) of every launch that it started.
        times: where the host's time went.
    """

    prefilled: int = 0
    generated: int = 0
    updated: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    launched: list[tuple[str, int, int]] = field(default_factory=list)
    times: Times = field(default_factory=Times)


class Engine:
    """Runs requests on one executor.

    Attributes:
        executor: launches; `runner` owns the caches.
        scheduler: decides who runs, and owns the pages.
        policy: chooses the path of every prefill.
        failures: launches that failed.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, policy: PrefillPolicy):
        self.executor = executor
        self.runner = executor.runner
        self.scheduler = scheduler
        self.policy = policy
        self.group = parallelism(executor.runner.model)
        self.failures = 0
        self._launcher = Launcher(executor, policy)
        self._flight: Flight | None = None
        self._to_score: deque[Request] = deque()
        self._lost = self.runner.caches_lost

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._to_score) or self.scheduler.has_work or self._flight is not None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run, it has ended already, or the queue is full.
        """
        if request.finished:
            raise ValueError(f"a request that ended ({request.finish_reason}) cannot run again.")
        request_knobs(request)
        if request.params.prompt_logprobs is not None:
            self._to_score.append(request)
        else:
            self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request at once, whatever it is doing; one that has ended is left alone."""
        if request in self._to_score:
            self._to_score.remove(request)
        self.scheduler.abort(request)

    def step(self) -> StepReport:
        """Launch the next plan, then take the results of the one before.

        A launch that fails ends its requests with a `StepError` in `request.error`; if it took the
        caches with it, all others start again from their tokens.
        """
        report = StepReport()
        try:
            self._step(report)
        except Exception as error:
            # Nobody in particular is to blame: everything that runs ends.
            logger.exception("a step failed")
            self._fail(list(self.scheduler.running), error, report)
            self._recover()
        except BaseException:
            self._recover()
            raise
        return report

    def close(self) -> None:
        """Stop compiling in the background; requests are left where they are."""
        self.executor.close()

    def _step(self, report: StepReport) -> None:
        if self.runner.caches_lost != self._lost:
            self._recover()
        self._score_next(report)
        started = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        landing, self._flight = self._flight, None
        launched = None if plan is None else self._launcher.launch(plan)
        waited = read = time.perf_counter()
        if launched is not None and not self._check(launched, report):
            return
        self._flight = launched
        if landing is not None:
            try:
                drawn, again = self._launcher.read(landing)
            except Exception as error:
                # Results that cannot be read: the caches of that launch are no better.
                self._fail(landing.requests, error, report)
                self._recover()
                return
            read = time.perf_counter()
            self._take(landing, drawn, report)
            if again and launched is not None:
                self._flight = self._launcher.launch(launched.plan, afresh=True)
                self._check(self._flight, report)
        elif plan is None and self.scheduler.has_work:
            stuck = RuntimeError("requests wait for pages that nobody will give back.")
            self._fail(list(self.scheduler.waiting), stuck, report)
        report.times = Times(
            planned - started, waited - planned, read - waited, time.perf_counter() - read
        )

    def _check(self, launched: Flight, report: StepReport) -> bool:
        """Note a plan's launches and end the requests of those that failed; False: caches lost."""
        for part in launched.parts:
            tokens = sum(part.draws)
            if not part.launch.wanted.decode:
                tokens = int(part.launch.inputs[:, 2].sum())
                report.prefilled += tokens
            report.launched.append((part.launch.wanted.name, part.launch.count, tokens))
        for requests, error in launched.failed:
            self._fail(requests, error, report)
        if self.runner.cache_deleted or self.runner.caches_lost != self._lost:
            self._recover()
            return False
        return True

    def _take(self, landing: Flight, drawn: dict[Request, Drawn], report: StepReport) -> None:
        """Give every request its tokens."""
        before = {request: len(request.output_token_ids) for request in drawn}
        finished = self.scheduler.apply(
            landing.plan, {request: one.tokens for request, one in drawn.items()}
        )
        for request, one in drawn.items():
            new = len(request.output_token_ids) - before[request]
            if not new:
                continue
            report.generated += new
            report.updated.append(request)
            if (count := request.params.logprobs) is not None:
                entries = (token_logprobs(one.sampled, i, one.row, count) for i in range(new))
                request.logprobs.extend(entries)
        report.finished += finished

    def _fail(self, requests: list[Request], error: Exception, report: StepReport) -> None:
        """End requests because of an error in a step."""
        self.failures += 1
        wrapped = error if isinstance(error, StepError) else step_error(error)
        wrapped.__cause__ = error if wrapped is not error else None
        logger.error("%d requests end: %s", len(requests), wrapped)
        for request in requests:
            if not request.finished:
                self.scheduler.fail(request, wrapped)
                report.updated.append(request)
                report.finished.append(request)

    def _recover(self) -> None:
        """Empty caches; whatever was running starts again from its tokens."""
        self._flight = None
        self._launcher.reset()
        self.scheduler.preempt_all()
        self._lost = self.runner.caches_lost

    def _score_next(self, report: StepReport) -> None:
        """Read one prompt whose own log-probabilities are asked for, on pages of its own.

        The request is queued afterwards, with its prompt read again for what follows it.
        """
        if not self._to_score:
            return
        request = self._to_score[0]
        prompt, count = request.prompt_token_ids, request.params.prompt_logprobs or 0
        pages = self.scheduler.reserve(len(prompt))
        if pages is None:
            return  # until some are free
        self._to_score.popleft()
        try:
            request.prompt_logprobs.append(None)
            for chunk in read_prompt(
                self.runner, self.policy, prompt, pages, chunk=SCORED_CHUNK, logits="all"
            ):
                request.prompt_logprobs += prompt_logprobs(chunk, prompt, count)
            self.scheduler.add(request)
        except Exception as error:
            self._fail([request], error, report)
        finally:
            self.scheduler.release(pages)
