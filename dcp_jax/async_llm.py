"""`AsyncLLM`: the engine on a thread of its own, for services that run on asyncio.

    async with AsyncLLM(dj.LLM(path)) as llm:
        async for piece in llm.stream("Once upon a time", params):
            print(piece.text, end="")

Only that thread touches the engine. Others leave it functions to call between two steps; it answers
by way of their event loop.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from dcp_jax.engine.outputs import RequestOutput, StreamOutput
from dcp_jax.engine.request import Request
from dcp_jax.engine.results import Pieces, request_output
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.llm import LLM
from dcp_jax.prompts import Prompt, text_of

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """A caller who waits for the requests of one prompt."""

    group: list[Request]
    pieces: Pieces
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue

    async def received(self) -> AsyncIterator[StreamOutput]:
        """What arrives, up to the last piece of every request."""
        running = len(self.group)
        while running:
            item = await self.inbox.get()
            if isinstance(item, BaseException):
                raise item
            running -= item.finish_reason is not None
            yield item

    def send(self, item: Any) -> bool:
        """Give the caller something; False if its event loop is gone."""
        try:
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)
        except RuntimeError:
            return False
        return True


class AsyncLLM:
    """Runs an `LLM` on a thread until it is closed; the LLM itself must not be used meanwhile."""

    def __init__(self, llm: LLM, *, warm_up: bool = True, use_tqdm: bool = True):
        """Start the thread.

        Args:
            llm: the model.
            warm_up: compile what every step can run in before the first request.
            use_tqdm: show a bar meanwhile.
        """
        self.llm = llm
        if warm_up:
            llm.warm_up(use_tqdm=use_tqdm)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[Request, _Job] = {}
        self._lock = threading.Lock()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dcp-jax-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StreamOutput]:
        """Continue one prompt, piece by piece; leave the loop or cancel the task to abort it.

        Raises:
            ValueError: as `LLM.generate`, or the queue is full.
            StepError: a step with this request failed.
            RuntimeError: closed.
        """
        job = self._job(prompt, sampling_params)
        try:
            self._post(lambda: self._submit(job))
            async for piece in job.received():
                yield piece
        finally:
            self._calls.put(lambda: self._drop(job))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """Continue one prompt; the whole result. Cancel the task to abort it.

        Raises:
            ValueError, StepError, RuntimeError: as `stream`.
        """
        job = self._job(prompt, sampling_params)
        try:
            self._post(lambda: self._submit(job))
            async for _ in job.received():
                pass
        finally:
            self._calls.put(lambda: self._drop(job))
        return request_output("0", text_of(prompt), job.group, self.llm.tokenizer)

    def close(self) -> None:
        """End the thread after the step in progress; whoever waits gets a RuntimeError."""
        self._calls.put(None)
        self._thread.join()
        self.llm.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _job(self, prompt: Prompt, params: SamplingParams | None) -> _Job:
        with self._lock:
            group = self.llm.requests(prompt, params)
        pieces = Pieces(group, self.llm.tokenizer)
        return _Job(group, pieces, asyncio.get_running_loop(), asyncio.Queue())

    def _post(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._ended is not None:
                raise RuntimeError("this AsyncLLM is closed: make another one.") from self._ended
            self._calls.put(call)

    # -- on the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        engine = self.llm.engine
        ended: BaseException = RuntimeError("this AsyncLLM was closed while a request ran.")
        try:
            while True:
                while not (engine.busy and self._calls.empty()):
                    call = self._calls.get()
                    if call is None:
                        return
                    call()
                for request in engine.step().updated:
                    if (job := self._jobs.get(request)) is not None:
                        self._answer(job)
        except BaseException as error:
            logger.exception("the engine's thread ends")
            ended = error
        finally:
            with self._lock:
                self._ended = ended
            # Those who called while the thread ended wait too.
            while not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call()
            for job in list(self._jobs.values()):
                job.send(ended)
                self._drop(job)

    def _submit(self, job: _Job) -> None:
        try:
            for request in job.group:
                self.llm.engine.submit(request)
                self._jobs[request] = job
        except ValueError as error:
            job.send(error)
            self._drop(job)

    def _answer(self, job: _Job) -> None:
        try:
            sent = all([job.send(piece) for piece in job.pieces.new()])
        except Exception as error:
            sent = job.send(error)
        if not sent:
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        """The caller is gone or has everything: what still runs is aborted."""
        for request in job.group:
            self._jobs.pop(request, None)
            self.llm.engine.abort(request)
