"""The loop over stages and steps: batches in, a log and a resumable state out."""

import json
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dcp_jax.config import ModelConfig
from tiny_training.attention import Implementation
from tiny_training.documents import TASKS, Batch
from tiny_training.feeder import Feeder
from tiny_training.model import init_params
from tiny_training.optimiser import TrainState, init_state, make_step
from tiny_training.stages import Stage
from tiny_training.state import load_state, save_state

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"
_IN_FLIGHT = 3  # steps given to the device before the oldest one's metrics are read
_RETRIEVAL = [list(TASKS).index(task) for task in ("passkey", "named")]


@dataclass
class Progress:
    """How far training is: it is saved with the state.

    Attributes:
        stage: name of the current stage, "" before the first.
        step: steps of it that are done.
        tokens: trained on in all.
        seconds: of training and compiling, in all calls together.
    """

    stage: str = ""
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def first_step(self, stage: Stage, stages: tuple[Stage, ...]) -> int:
        """The step at which `stage` goes on; its step count if it is done."""
        names = [s.name for s in stages]
        here = names.index(self.stage) if self.stage else 0
        at = names.index(stage.name)
        return stage.steps if at < here else (min(self.step, stage.steps) if at == here else 0)


def train(
    directory: str | Path,
    text: np.ndarray,
    cfg: ModelConfig,
    stages: tuple[Stage, ...],
    *,
    seed: int = 0,
    workers: int = 0,
    seconds: float = float("inf"),
    attention: Implementation = "xla",
    dtype: str = "bfloat16",
    log_every: int = 20,
    save_every: float = 150.0,
    quiet: bool = False,
) -> bool:
    """Train from where the state in `directory` stands until the end, or until time is up.

    Args:
        directory: of the state and of the log.
        text: corpus, uint8 [N].
        cfg: the model.
        stages: what to do.
        seed: of the initial parameters and of all data.
        workers: processes that make batches.
        seconds: stop, with the state saved, when so many have passed since the call.
        attention: implementation of the main attention.
        dtype: of the computation.
        log_every: steps per line of the log.
        save_every: seconds between saves; the end of a stage is saved as well.
        quiet: no progress bar.

    Returns:
        Whether all stages are done.
    """
    began = time.monotonic()
    state = init_state(init_params(cfg, seed))
    progress = Progress()
    if (found := load_state(directory, state)) is not None:
        state, progress = found[0], Progress(**found[1])
        logger.info("going on at step %d of stage %s", progress.step, progress.stage)
    before = progress.seconds

    def save() -> None:
        progress.seconds = before + time.monotonic() - began
        save_state(directory, state, vars(progress))

    Path(directory).mkdir(parents=True, exist_ok=True)
    saved = began
    with Feeder(text, seed, workers) as feeder, _Log(Path(directory) / LOG_FILE, log_every) as log:
        for stage in stages:
            first = progress.first_step(stage, stages)
            if first >= stage.steps:
                continue
            if time.monotonic() - began > seconds:
                save()
                return False
            progress.stage, progress.step = stage.name, first
            batches = feeder.batches(stage, first)  # worker processes begin while XLA compiles
            batch = next(batches)
            program = _compile(cfg, stage, attention, dtype, state, batch)
            bar = tqdm(total=stage.steps, initial=first, desc=stage.name, disable=quiet)
            log.start()
            with bar:
                while batch is not None:
                    lr = stage.learning_rate(progress.step)
                    state, metrics, correct = program(state, batch, jnp.float32(lr))
                    progress.step += 1
                    progress.tokens += stage.tokens
                    log.add(stage, progress, lr, batch, metrics, correct)
                    bar.set_postfix_str(log.summary, refresh=False)
                    bar.update()
                    asked = time.monotonic()
                    if asked - began > seconds:
                        break
                    if asked - saved > save_every:
                        save()
                        saved = time.monotonic()
                        asked = saved
                    batch = next(batches, None)
                    log.data_seconds += time.monotonic() - asked
            log.flush()
            save()
            saved = time.monotonic()
            if progress.step < stage.steps:
                return False
    return True


def _compile(cfg, stage: Stage, attention, dtype, state: TrainState, batch: Batch) -> Any:
    began = time.monotonic()
    step = jax.jit(make_step(cfg, stage, attention, jnp.dtype(dtype)), donate_argnums=0)
    program = step.lower(state, batch, jnp.float32(0)).compile()
    logger.info("stage %s compiled in %.1f s", stage.name, time.monotonic() - began)
    return program


class _Log:
    """Means of the metrics over a few steps, one JSON object a line.

    Metrics are read a few steps late, so that the device always has the next step to do.
    """

    def __init__(self, path: Path, every: int):
        self._path, self._every = path, every
        self._waiting: deque = deque()
        self.summary, self.data_seconds = "", 0.0
        self._clear()

    def __enter__(self) -> "_Log":
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _clear(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._hits: dict[str, list[int]] = {}
        self._began, self.data_seconds = time.monotonic(), 0.0

    def start(self) -> None:
        """Times count from here: what came before was compiling."""
        self._clear()

    def add(self, stage, progress, lr, batch: Batch, metrics, correct) -> None:
        """Take the results of the step just given to the device."""
        line = {
            "stage": stage.name,
            "length": stage.length,
            "step": progress.step,
            "tokens": progress.tokens,
            "lr": lr,
        }
        self._waiting.append((line, batch, metrics, correct))
        if len(self._waiting) > _IN_FLIGHT:
            self._read()

    def flush(self) -> None:
        """Read what is waiting and write the last, perhaps shorter, line of a stage."""
        while self._waiting:
            self._read()
        if self._sums:
            self._write(self._line)
        self._clear()

    def _read(self) -> None:
        self._line, batch, metrics, correct = self._waiting.popleft()
        metrics, correct = jax.device_get((metrics, correct))
        for name, value in metrics.items():
            self._sums.setdefault(name, []).append(float(value))
        for names, right in answered(batch, correct):
            for name in names:
                count = self._hits.setdefault(name, [0, 0])
                count[0] += right
                count[1] += 1
        retrieved = [h for name, h in self._hits.items() if name in ("passkey", "named", "keys")]
        rate = sum(h[0] for h in retrieved) / max(sum(h[1] for h in retrieved), 1)
        self.summary = f"loss {metrics['loss']:.3f}, accuracy {rate:.3f}"
        if self._line["step"] % self._every == 0:
            self._write(self._line)
            self._clear()

    def _write(self, line: dict[str, Any]) -> None:
        steps = max(len(next(iter(self._sums.values()))), 1)
        for name, values in self._sums.items():
            known = [v for v in values if not np.isnan(v)]
            line[name] = round(float(np.mean(known)), 5) if known else None
        line["accuracy"] = {k: [round(h / n, 4), n] for k, (h, n) in sorted(self._hits.items())}
        line["step_seconds"] = round((time.monotonic() - self._began) / steps, 4)
        line["data_seconds"] = round(self.data_seconds / steps, 4)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def answered(batch: Batch, correct: np.ndarray) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Per question: its task and, for retrieval, its length ("<=8192"); whether all is right."""
    tasks = list(TASKS)
    length = batch.tokens.shape[1]
    for b in range(len(batch.tasks)):
        # A question beyond the sequence's end is none.
        real = (batch.targets[b] >= 0) & (batch.targets[b] < length - 2)
        if not real.any():
            continue
        questions = batch.questions[b][real]
        wrong = np.bincount(questions, weights=~correct[b][real])
        task = int(batch.tasks[b])
        names: tuple[str, ...] = (tasks[task],)
        if task in _RETRIEVAL:
            names += (f"<={2 ** int(np.ceil(np.log2(max(batch.lengths[b], 512))))}",)
        for question in np.unique(questions):
            yield names, bool(wrong[question] == 0)
