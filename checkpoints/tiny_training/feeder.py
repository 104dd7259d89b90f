"""Batches from worker processes, in order; a batch depends on its seed, stage and step only.

So a run that was stopped goes on with exactly the batches it would have had.
"""

import multiprocessing
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from tiny_training.documents import Batch, make_batch
from tiny_training.stages import Stage

_text: np.ndarray | None = None  # of a worker process: sent once, not with every batch


def batch_of(stage: Stage, step: int, seed: int, text: np.ndarray) -> Batch:
    """The batch of step `step` of a stage."""
    rng = np.random.default_rng([seed, zlib.crc32(stage.name.encode()), step])
    return make_batch(
        rng,
        text,
        batch=stage.batch,
        length=stage.length,
        rows=stage.rows,
        shares=stage.shares,
        shortest=stage.shortest,
    )


def _start(text: np.ndarray) -> None:
    global _text
    _text = text


def _work(stage: Stage, step: int, seed: int) -> Batch:
    assert _text is not None, "the pool's initializer ran"
    return batch_of(stage, step, seed, _text)


class Feeder:
    """Makes batches ahead of the steps that take them; a context manager."""

    def __init__(self, text: np.ndarray, seed: int, workers: int):
        """`workers` processes; with 0 the caller's own makes each batch when it is asked for."""
        self._text, self._seed, self._workers = text, seed, workers
        self._pool = None

    def __enter__(self) -> "Feeder":
        if self._workers:
            # Not forked: the parent has a device runtime with threads of its own.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, _start, (self._text,))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def batches(self, stage: Stage, first: int) -> Iterator[Batch]:
        """The stage's batches from step `first` to its end."""
        steps = iter(range(first, stage.steps))
        if self._pool is None:
            for step in steps:
                yield batch_of(stage, step, self._seed, self._text)
            return
        waiting: deque = deque()
        while True:
            while len(waiting) < 3 * self._workers and (step := next(steps, None)) is not None:
                waiting.append(self._pool.submit(_work, stage, step, self._seed))
            if not waiting:
                return
            yield waiting.popleft().result()
