"""Runs steps of the model on the devices: the only place that jits it, and the owner of the caches.

A step's shapes are rounded up to buckets, and each (shapes, options) pair is compiled once, ahead
of time. Caches are donated: a step updates them in place and the runner keeps the new handles.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from dcp_jax.cache.pool import CacheSpec, init_cache
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.dcp.step import Batch, StepOptions
from dcp_jax.dcp.traffic import Collective, collectives, received_by_kind
from dcp_jax.mesh import DCP
from dcp_jax.model import Model, StepOutput

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """One sequence's part of a step: its new tokens, how many are cached, and its pages."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclass(frozen=True)
class StepResult:
    """What a step gave, on the host, without the padding of its buckets.

    Attributes:
        next_tokens: greedy token after each row.
        logits: float32 [rows, 1 or T, vocab] if asked for.
        hidden: [rows, T, d] if asked for, still on the devices and padded to the bucket.
        explanation: numpy arrays over the padded [B, T], if asked for.
        received_bytes: what one rank received, by kind of exchange (reruns included).
        reruns: 1 if the pruned candidates were not certified and the step ran again, else 0.
    """

    next_tokens: list[int]
    logits: Any
    hidden: jax.Array | None
    explanation: Any
    received_bytes: dict[str, int]
    reruns: int


class _Program(NamedTuple):
    run: Any
    traffic: list[Collective]


# Buckets: few enough to compile, close enough not to waste much. A short page table costs so little
# that all contexts below this many tokens share one.
SHORT_CONTEXT = 512
_ROWS, _TOKENS, _PAGES = 4, 4, 2  # ratio of neighbouring buckets


def bucket(size: int, factor: int, smallest: int = 1) -> int:
    """The smallest of `smallest * factor**i` that holds `size`."""
    fits = smallest
    while fits < size:
        fits *= factor
    return fits


class Runner:
    """Owner of the caches and of the compiled steps.

    Attributes:
        cache: both caches; replaced by every step.
        programs: how many executables were compiled.
        compile_seconds: spent on them.
        reruns: steps that ran again with full-width candidates.
    """

    def __init__(
        self,
        model: Model,
        params: dict,
        spec: CacheSpec,
        opts: StepOptions,
        *,
        largest_step: int | None = None,
    ):
        """`largest_step`: tokens per row of the largest step there will be, if it is known."""
        self.model = model
        self.params = params
        self.spec = spec
        self.opts = opts
        self.largest_step = largest_step
        self.cache = init_cache(spec, model.mesh)
        self.compile_seconds = 0.0
        self.reruns = 0
        self._programs: dict[tuple, _Program] = {}

    @property
    def programs(self) -> int:
        """Executables compiled so far."""
        return len(self._programs)

    def step(self, rows: Sequence[Row], *, table_width: int | None = None, **changes) -> StepResult:
        """Run one step of the model.

        Args:
            rows: sequences with at least one new token each.
            table_width: pages per row to compile for (default: the longest row's); callers that
                know how long rows will grow pass it, so that growth does not compile again.
            **changes: fields of `StepOptions` that differ from the runner's.
        """
        return self._run(None, rows, table_width, changes)

    def step_mtp(
        self, rows: Sequence[Row], hidden: jax.Array, *, table_width: int | None = None, **changes
    ) -> StepResult:
        """Run one step of the NextN layer on `hidden` [B, T, d], padded as a step returns it."""
        return self._run(hidden, rows, table_width, changes)

    def trace(
        self,
        rows: Sequence[Row],
        hidden: jax.Array | None = None,
        *,
        table_width: int | None = None,
        **changes,
    ) -> jax.stages.Traced:
        """The program of `step` (with `hidden`, of `step_mtp`) for these rows; nothing runs."""
        inputs, opts = self._inputs(hidden, rows, table_width, changes)
        return self._trace(inputs, opts)

    def _inputs(self, hidden, rows, table_width, changes) -> tuple[tuple, StepOptions]:
        batch = self._pad(rows, table_width, None if hidden is None else hidden.shape[1])
        inputs = (batch,) if hidden is None else (batch, hidden)
        return inputs, replace(self.opts, **changes)

    def _run(self, hidden, rows, table_width, changes) -> StepResult:
        inputs, opts = self._inputs(hidden, rows, table_width, changes)
        program, output = self._execute(inputs, opts)
        traffic, reruns = list(program.traffic), 0
        certified = np.asarray(output.certified)
        if not certified[: len(rows)].all():
            # Writes of the first run are overwritten with the right values: decode is idempotent.
            logger.info("pruned candidates were not certified: the step runs again in full width")
            program, output = self._execute(inputs, replace(opts, candidates="full"))
            traffic, reruns = traffic + program.traffic, 1
            self.reruns += 1
        return self._to_host(output, len(rows), opts, received_by_kind(traffic), reruns)

    def _execute(self, inputs: tuple, opts: StepOptions) -> tuple[_Program, StepOutput]:
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(inputs))
        key = (shapes, opts)
        if key not in self._programs:
            self._programs[key] = self._compile(inputs, opts)
        program = self._programs[key]
        output, self.cache = program.run(self.params, self.cache, *inputs)
        return program, output

    def _trace(self, inputs: tuple, opts: StepOptions) -> jax.stages.Traced:
        forward = self.model.forward if len(inputs) == 1 else self.model.forward_mtp

        def step(params, cache, *inputs):
            return forward(params, cache, *inputs, spec=self.spec, opts=opts)

        return jax.jit(step, donate_argnums=1).trace(self.params, self.cache, *inputs)

    def _compile(self, inputs: tuple, opts: StepOptions) -> _Program:
        started = time.perf_counter()
        traced = self._trace(inputs, opts)
        traffic = list(collectives(traced.jaxpr, dict(self.model.mesh.shape)))
        compiled = traced.lower().compile()
        seconds = time.perf_counter() - started
        self.compile_seconds += seconds
        shape = inputs[0].tokens.shape
        logger.info("compiled a step of %s rows x tokens in %.1f s (%s)", shape, seconds, opts.path)
        return _Program(compiled, traffic)

    def _pad(self, rows: Sequence[Row], table_width: int | None, tokens: int | None) -> Batch:
        """Rows as arrays of bucket sizes; padding rows have length 0 and touch nothing."""
        count = bucket(len(rows), _ROWS)
        longest = max(len(row.tokens) for row in rows)
        if tokens is None:
            tokens = 1 if longest == 1 else self._token_bucket(longest)
        pages = max(table_width or 0, *(len(row.pages) for row in rows), 1)
        short = pages_needed(SHORT_CONTEXT, self.spec.page_size, self.dcp_size)
        width = bucket(pages, _PAGES, min(short, self.spec.pages))
        batch = Batch(
            tokens=np.zeros((count, tokens), np.int32),
            starts=np.zeros(count, np.int32),
            lengths=np.zeros(count, np.int32),
            page_table=np.full((count, width), -1, np.int32),
        )
        for i, row in enumerate(rows):
            self._check_pages(row)
            batch.tokens[i, : len(row.tokens)] = row.tokens
            batch.starts[i] = row.start
            batch.lengths[i] = len(row.tokens)
            batch.page_table[i, : len(row.pages)] = row.pages
        return batch

    def _check_pages(self, row: Row) -> None:
        """A token without a page would be dropped from the caches, and never be seen again."""
        tokens = row.start + len(row.tokens)
        needed = pages_needed(tokens, self.spec.page_size, self.dcp_size)
        if len(row.pages) < needed:
            raise ValueError(
                f"A row of {tokens} tokens has {len(row.pages)} pages but needs {needed}, of "
                f"{self.spec.page_size * self.dcp_size} tokens each: allocate them before the step."
            )

    def _token_bucket(self, longest: int) -> int:
        """Never beyond the largest step that the engine makes: a full chunk is not padded."""
        fits = bucket(longest, _TOKENS, smallest=16)
        return fits if self.largest_step is None else max(longest, min(fits, self.largest_step))

    def _to_host(self, output, rows, opts, received, reruns) -> StepResult:
        vocab = self.model.cfg.vocab_size
        explanation = output.explanation
        return StepResult(
            next_tokens=np.asarray(output.next_tokens)[:rows].tolist(),
            logits=None if output.logits is None else np.asarray(output.logits)[:rows, :, :vocab],
            hidden=output.hidden,
            explanation=None if explanation is None else jax.tree.map(np.asarray, explanation),
            received_bytes=received,
            reruns=reruns,
        )

    @property
    def dcp_size(self) -> int:
        """Ranks that share the caches."""
        return self.model.mesh.shape[DCP]
