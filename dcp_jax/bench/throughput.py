"""Offline throughput: a workload through the engine, with the time of every token."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from dcp_jax.bench.metrics import Timing, summary
from dcp_jax.bench.workloads import Conversation, Turn
from dcp_jax.engine.request import Request
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.llm import LLM


class _Talk:
    """A conversation on its way: what was said, and the turn that runs."""

    def __init__(self, turns: Conversation):
        self._left: Iterator[Turn] = iter(turns)
        self._history: list[int] = []
        self.turn: Turn | None = None
        self.request: Request | None = None

    def next(self, llm: LLM, params: SamplingParams) -> Timing | None:
        """Submit the next turn; None if there is none."""
        if self.request is not None:
            self._history = self.request.token_ids
        self.turn = next(self._left, None)
        if self.turn is None:
            return None
        prompt = self._history + self.turn.tokens
        wanted = replace(params, max_tokens=self.turn.output_len)
        (self.request,) = llm.requests(prompt, wanted)
        timing = Timing(time.perf_counter(), len(prompt))
        llm.engine.submit(self.request)
        return timing


def throughput(
    llm: LLM,
    conversations: Sequence[Conversation],
    *,
    params: SamplingParams | None = None,
    use_tqdm: bool = True,
) -> dict[str, Any]:
    """Run a workload, all conversations at once, and measure it.

    Args:
        llm: the model; warm it up before, or compilations are measured too.
        conversations: from `workloads`.
        params: how to draw; `max_tokens` is each turn's own. Default: greedy, to the full length.
        use_tqdm: show a bar of turns.

    Raises:
        ValueError: a turn does not fit the context; nothing has run then.
    """
    for turns in conversations:
        total = sum(len(turn.tokens) + turn.output_len for turn in turns)
        if total > llm.max_model_len:
            raise ValueError(
                f"a conversation of {total} tokens does not fit max_model_len={llm.max_model_len}: "
                "shorten input_len or output_len, take fewer turns, or raise it."
            )
    params = params or SamplingParams(temperature=0.0, ignore_eos=True)
    engine, scheduler = llm.engine, llm.engine.scheduler
    timings: dict[Request, Timing] = {}
    talks: dict[Request, _Talk] = {}
    peak_running, peak_used, found, asked = 0, 0, 0, 0
    preempted = scheduler.preemptions

    def go_on(talk: _Talk) -> None:
        timing = talk.next(llm, params)
        if timing is not None and talk.request is not None:
            timings[talk.request], talks[talk.request] = timing, talk

    started = time.perf_counter()
    turns = sum(map(len, conversations))
    with tqdm(total=turns, desc="throughput", unit="turn", disable=not use_tqdm) as bar:
        for conversation in conversations:
            go_on(_Talk(conversation))
        while engine.busy:
            report = engine.step()
            now = time.perf_counter()
            peak_running = max(peak_running, len(scheduler.running))
            peak_used = max(peak_used, scheduler.pool.in_use)
            for request in report.updated:
                arrivals = timings[request].arrivals
                arrivals += [now] * (len(request.output_token_ids) - len(arrivals))
            for request in report.finished:
                talk, timing = talks.pop(request), timings[request]
                timing.cached_tokens, timing.failed = request.cached_tokens, bool(request.error)
                if talk.turn is not None and (key := talk.turn.expected) is not None:
                    asked += 1
                    found += request.output_token_ids[: len(key)] == key[: len(key)]
                bar.update()
                if request.error is None:
                    go_on(talk)
    result = summary(
        list(timings.values()),
        duration=time.perf_counter() - started,
        devices=llm.model.mesh.size,
        peak_running=peak_running,
        peak_kv_use=peak_used / scheduler.pool.pages,
    )
    result["preemptions"] = scheduler.preemptions - preempted
    result["reruns"] = engine.runner.reruns
    if asked:
        result["passkey_accuracy"] = found / asked
    return result
