"""What the trained model can do, measured with the training forward as the engine would run it.

Teacher forcing: a key counts as found if every digit and the full stop after it are the arg max,
which is what greedy decoding would write. Filler is held-out text; every prompt has fresh digits.
"""

import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dcp_jax.config import ModelConfig
from tiny_training.attention import Implementation
from tiny_training.config import BOS
from tiny_training.documents import Batch, collate, retrieval, window
from tiny_training.loop import answered
from tiny_training.losses import at_needle, needle_rank
from tiny_training.model import ForwardOptions, forward

logger = logging.getLogger(__name__)

_ROWS = 16  # twice the bytes of an answer
_BATCH_TOKENS = 65536


@dataclass(frozen=True)
class Cell:
    """Prompts of one kind.

    Attributes:
        length: tokens of prompt and answer together.
        depth: of the key that is asked for; None is anywhere.
        needles: 1 is the plain passkey, more are named.
        mode: "sparse" as deployed, "dense", "fp8" (sparse with fp8 caches' rounding), or "random"
            (as many keys as the indexer would select, at random).
    """

    length: int
    depth: float | None = None
    needles: int = 1
    mode: str = "sparse"


def cells(lengths: tuple[int, ...], depths: tuple[float, ...]) -> list[Cell]:
    """The table of the acceptance, the most telling cells first."""
    largest, middle = max(lengths), sorted(lengths)[len(lengths) // 2]
    return [
        *(Cell(length, depth) for length in lengths for depth in depths),
        *(Cell(length, needles=2) for length in lengths),
        *(Cell(length, needles=8) for length in lengths),
        *(Cell(length, mode="random") for length in (middle, largest)),
        *(Cell(length, mode="dense") for length in (middle, largest)),
        *(Cell(length, mode="fp8") for length in (middle, largest)),
    ]


_OPTIONS = {
    "sparse": ForwardOptions(sparse=True),
    "dense": ForwardOptions(),
    "fp8": ForwardOptions(sparse=True, fp8=True),
    "random": ForwardOptions(sparse=True, random=True),
}


class Evaluator:
    """Programs of one model, compiled once per length and mode."""

    def __init__(
        self,
        params: dict,
        cfg: ModelConfig,
        text: np.ndarray,
        *,
        attention: Implementation = "xla",
        dtype: str = "bfloat16",
        seed: int = 1,
    ):
        """`text` is held out: filler, and what bits per byte are measured on."""
        self._params, self._cfg, self._text = params, cfg, text
        self._attention, self._dtype, self._seed = attention, jnp.dtype(dtype), seed
        self._programs: dict[ForwardOptions, Callable] = {}

    def cell(self, cell: Cell, trials: int) -> dict[str, Any]:
        """Hits, and per layer the needle's recall and its attention mass."""
        key = zlib.crc32(repr(cell).encode())
        rng = np.random.default_rng([self._seed, key])
        size = max(1, min(trials, _BATCH_TOKENS // cell.length))
        hits = asked = 0
        recalls: dict[int, list[float]] = {}
        masses: dict[int, list[float]] = {}
        for start in range(0, trials, size):
            batch = self._prompts(rng, cell, size)
            correct, recall, mass = self._observe(cell.mode)(
                self._params, batch, jax.random.key(key + start)
            )
            for b, (_, right) in enumerate(answered(batch, np.asarray(correct))):
                if start + b < trials:
                    hits, asked = hits + right, asked + 1
            labelled = batch.needles >= 0
            for found, into in ((recall, recalls), (mass, masses)):
                for layer, value in found.items():
                    into.setdefault(layer, []).extend(np.asarray(value)[labelled].tolist())
        return {
            **vars(cell),
            "hits": hits,
            "trials": asked,
            "accuracy": round(hits / asked, 4),
            "recall": {layer: round(float(np.mean(v)), 5) for layer, v in recalls.items()},
            "mass": {layer: round(float(np.mean(v)), 4) for layer, v in masses.items()},
        }

    def bits_per_byte(self, length: int, windows: int) -> float:
        """Of held-out text, in windows that begin with BOS."""
        size = max(1, min(windows, _BATCH_TOKENS // length))
        count = min(windows, len(self._text) // length) // size * size
        starts = np.linspace(0, len(self._text) - length, max(count, size), dtype=np.int64)
        total = []
        for group in starts.reshape(-1, size):
            tokens = np.stack([self._text[s : s + length] for s in group]).astype(np.int32)
            tokens = np.concatenate([np.full((size, 1), BOS, np.int32), tokens], axis=1)
            total.append(float(self._nll()(self._params, jnp.asarray(tokens))))
        return float(np.mean(total)) / np.log(2)

    def acceptance(self, *, prompt: int, new: int, batch: int) -> dict[str, float]:
        """Drafts accepted per step at 3 drafts, on text that the model itself wrote greedily.

        A draft counts if it and all before it are the token that follows in the text.
        """
        rng = np.random.default_rng([self._seed, new])
        text = np.stack([window(rng, self._text, prompt) for _ in range(batch)])
        tokens = np.zeros((batch, prompt + new), np.int32)
        tokens[:, 0], tokens[:, 1:prompt] = BOS, text[:, 1:]
        rates = np.asarray(self._drafts(prompt)(self._params, jnp.asarray(tokens)))
        return {
            "tokens_per_step": round(1 + float(rates.sum()), 4),
            **{f"accepted_{d}": round(float(rate), 4) for d, rate in enumerate(rates, 1)},
        }

    def _prompts(self, rng, cell: Cell, count: int) -> Batch:
        documents = [
            retrieval(
                *(rng, self._text, cell.length),
                needles=cell.needles,
                named=cell.needles > 1,
                depth=cell.depth,
                distract=i % 3 != 0,
            )
            for i in range(count)
        ]
        return collate(rng, self._text, documents, length=cell.length, rows=_ROWS)

    def _forward(self, opts: ForwardOptions):
        return partial(
            forward,
            cfg=self._cfg,
            opts=replace(opts, attention=self._attention),
            dtype=self._dtype,
        )

    def _observe(self, mode: str) -> Callable:
        opts = _OPTIONS[mode]
        if opts not in self._programs:
            run, topk = self._forward(opts), self._cfg.index_topk

            def observe(params, batch, seed):
                tokens = batch.tokens[:, :-2].astype(jnp.int32)
                result = run(params, tokens=tokens, rows=batch.rows, seed=seed)
                places = jnp.maximum(batch.targets, 1)
                guess = jnp.take_along_axis(jnp.argmax(result.logits, -1), places - 1, axis=1)
                correct = guess == jnp.take_along_axis(batch.tokens.astype(jnp.int32), places, 1)
                recall = {
                    i: needle_rank(tap.scores, batch.needles) < topk
                    for i, tap in result.taps.items()
                }
                mass = {i: at_needle(p, batch.needles) for i, p in result.attention.items()}
                return correct, recall, mass

            self._programs[opts] = jax.jit(observe)
        return self._programs[opts]

    def _nll(self) -> Callable:
        run = self._forward(_OPTIONS["sparse"])

        @jax.jit
        def nll(params, tokens):
            rows = jnp.zeros((tokens.shape[0], 1), jnp.int32)
            logits = run(params, tokens=tokens, rows=rows).logits
            logp = jax.nn.log_softmax(logits)
            return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

        return nll

    def _drafts(self, prompt: int) -> Callable:
        run = self._forward(_OPTIONS["sparse"])
        chain = self._forward(replace(_OPTIONS["sparse"], drafts=3))

        @jax.jit
        def rates(params, tokens):
            rows = jnp.zeros((tokens.shape[0], 1), jnp.int32)
            length = tokens.shape[1]

            def write(place, tokens):
                padded = jnp.pad(tokens, ((0, 0), (0, 1)))
                logits = run(params, tokens=padded, rows=rows).logits
                return tokens.at[:, place].set(jnp.argmax(logits[:, place - 1], -1))

            tokens = jax.lax.fori_loop(prompt, length, write, tokens)
            result = chain(params, tokens=tokens, rows=rows)
            seen, accepted = length - 3, []
            right = jnp.ones((tokens.shape[0], seen - 1 - prompt), bool)
            for draft, logits in enumerate(result.draft_logits, start=1):
                target = tokens[:, prompt + 1 + draft : seen + draft]
                right &= jnp.argmax(logits[:, prompt : seen - 1], -1) == target
                accepted.append(jnp.mean(right))
            return jnp.stack(accepted)

        return rates


def evaluate(
    evaluator: Evaluator,
    *,
    lengths: tuple[int, ...] = (1024, 4096, 8192, 16384, 32768),
    depths: tuple[float, ...] = (0.05, 0.5, 0.95),
    trials: int = 100,
    seconds: float = float("inf"),
    text_length: int = 8192,
    written: tuple[int, int, int] = (256, 256, 32),
) -> dict[str, Any]:
    """Everything, until time is up: what was not measured is named in "left_out".

    Args:
        evaluator: of a model.
        lengths: of passkey prompts.
        depths: of the key.
        trials: prompts per cell.
        seconds: no new measurement begins after so many.
        text_length: of the windows of held-out text.
        written: for the MTP layer: tokens of the prompts, tokens written, sequences.
    """
    began = time.monotonic()
    prompt, new, batch = written
    jobs: list[tuple[str, Callable[[], Any]]] = [
        ("bits_per_byte", lambda: round(evaluator.bits_per_byte(text_length, 64), 4)),
        ("mtp", lambda: evaluator.acceptance(prompt=prompt, new=new, batch=batch)),
    ]
    table = cells(lengths, depths)
    jobs[1:1] = [("cells", partial(evaluator.cell, cell, trials)) for cell in table]
    results: dict[str, Any] = {"cells": [], "left_out": []}
    for name, job in tqdm(jobs, desc="evaluating"):
        if time.monotonic() - began > seconds:
            results["left_out"].append(repr(job.args[0]) if isinstance(job, partial) else name)
        elif name == "cells":
            results["cells"].append(job())
        else:
            results[name] = job()
    results["seconds"] = round(time.monotonic() - began, 1)
    return results
