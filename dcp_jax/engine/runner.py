"""Runs steps of the model on the devices: the only place that jits it, and the owner of the caches.

`step` runs one step and waits for it, for callers that want its logits, hidden states or
selections. Its shapes are rounded up to buckets, and each (shapes, options) pair is compiled once,
ahead of time. The engine's own launches, which nobody waits for, are in `executor.py`. Caches are
donated: a step updates them in place and the runner keeps the new handles.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from dcp_jax.cache.pool import CacheSpec, init_cache
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.dcp.step import Batch, StepOptions
from dcp_jax.dcp.traffic import Collective, collectives, received_by_kind
from dcp_jax.engine.buckets import page_bucket, row_bucket, token_bucket
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
        next_tokens: the most likely token after each row.
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


class _Inputs(NamedTuple):
    """Everything a program takes beside parameters and caches; None where it has no such input."""

    batch: Batch
    hidden: jax.Array | None = None


class _Program(NamedTuple):
    run: Any
    traffic: list[Collective]


class Runner:
    """Owner of the caches and of the compiled steps.

    Attributes:
        cache: both caches; replaced by every step.
        compile_seconds: spent on them.
        reruns: steps that ran again with full-width candidates, launches of the engine included.
        caches_lost: how often an interrupted step took the caches with it.
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
        self.caches_lost = 0
        self._programs: dict[tuple, _Program] = {}

    @property
    def programs(self) -> int:
        """Executables of `step` compiled so far."""
        return len(self._programs)

    def step(
        self,
        rows: Sequence[Row],
        *,
        table_width: int | None = None,
        **changes,
    ) -> StepResult:
        """Run one step of the model and wait for it.

        Args:
            rows: sequences with at least one new token each.
            table_width: pages per row to compile for (default: the longest row's); callers that
                know how long rows will grow pass it, so that growth does not compile again.
            **changes: fields of `StepOptions` that differ from the runner's.
        """
        return self._run(rows, table_width, changes)

    def step_mtp(
        self, rows: Sequence[Row], hidden: jax.Array, *, table_width: int | None = None, **changes
    ) -> StepResult:
        """Run one step of the NextN layer on `hidden` [B, T, d], padded as a step returns it."""
        return self._run(rows, table_width, changes, hidden=hidden)

    def trace(
        self,
        rows: Sequence[Row],
        hidden: jax.Array | None = None,
        *,
        table_width: int | None = None,
        **changes,
    ) -> jax.stages.Traced:
        """The program of `step` (with `hidden`, of `step_mtp`) for these rows; nothing runs."""
        opts = replace(self.opts, **changes)
        return self._trace(self._inputs(rows, table_width, hidden), opts)

    def compile(
        self, function: Callable, *args: Any, donate: int | None = None, out_shardings: Any = None
    ) -> Any:
        """Compile a function ahead of time for arguments like these (arrays or their shapes).

        Args:
            function: to run on the devices.
            *args: its arguments.
            donate: number of the argument that it updates in place.
            out_shardings: of its results; None leaves them to XLA.
        """
        started = time.perf_counter()
        donated = () if donate is None else donate
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=out_shardings)
        compiled = jitted.trace(*args).lower().compile()
        self.compile_seconds += time.perf_counter() - started
        return compiled

    def reset(self) -> None:
        """Empty caches in place of ones that a failed step took with it."""
        self.cache = init_cache(self.spec, self.model.mesh)
        self.caches_lost += 1

    @property
    def cache_deleted(self) -> bool:
        """Whether a step took the caches and gave none back."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.cache))

    def _inputs(self, rows, table_width, hidden=None) -> _Inputs:
        return _Inputs(
            self._pad(rows, table_width, None if hidden is None else hidden.shape[1]), hidden
        )

    def _run(self, rows, table_width, changes, *, hidden=None) -> StepResult:
        opts = replace(self.opts, **changes)
        inputs = self._inputs(rows, table_width, hidden)
        program, output = self._execute(inputs, opts)
        traffic, reruns = list(program.traffic), 0
        certified = np.asarray(output.certified)
        if not certified[: len(rows)].all():
            # Writes of the first run are overwritten with the right values: decode is idempotent.
            logger.info("pruned candidates were not certified: the step runs again in full width")
            program, output = self._execute(inputs, replace(opts, candidates="full"))
            traffic, reruns = traffic + program.traffic, 1
            self.reruns += 1
        return self._to_host(output, len(rows), received_by_kind(traffic), reruns)

    def _execute(self, inputs: _Inputs, opts: StepOptions) -> tuple[_Program, StepOutput]:
        key = (tuple(leaf.shape for leaf in jax.tree.leaves(inputs)), opts)
        if key not in self._programs:
            self._programs[key] = self._compile(inputs, opts)
        program = self._programs[key]
        try:
            output, self.cache = program.run(self.params, self.cache, inputs)
        except BaseException:
            # The old caches were given to the step; interrupted here, the new ones are lost. The
            # next calls get empty ones; the engine starts again whatever was in them.
            if self.cache_deleted:
                self.reset()
            raise
        return program, output

    def _trace(self, inputs: _Inputs, opts: StepOptions) -> jax.stages.Traced:
        model, spec = self.model, self.spec

        def step(params, cache, inputs: _Inputs):
            batch, hidden = inputs
            if hidden is None:
                return model.forward(params, cache, batch, spec=spec, opts=opts)
            return model.forward_mtp(params, cache, batch, hidden, spec=spec, opts=opts)

        return jax.jit(step, donate_argnums=1).trace(self.params, self.cache, inputs)

    def _compile(self, inputs: _Inputs, opts: StepOptions) -> _Program:
        started = time.perf_counter()
        traced = self._trace(inputs, opts)
        traffic = list(collectives(traced.jaxpr, dict(self.model.mesh.shape)))
        compiled = traced.lower().compile()
        seconds = time.perf_counter() - started
        self.compile_seconds += seconds
        shape = inputs.batch.tokens.shape
        logger.info("compiled a step of %s rows x tokens in %.1f s (%s)", shape, seconds, opts.path)
        return _Program(compiled, traffic)

    def _pad(self, rows: Sequence[Row], table_width: int | None, tokens: int | None) -> Batch:
        """Rows as arrays of bucket sizes; padding rows have length 0 and touch nothing."""
        count = row_bucket(len(rows))
        longest = max(len(row.tokens) for row in rows)
        if tokens is None:
            tokens = token_bucket(longest, self.largest_step)
        pages = max(table_width or 0, *(len(row.pages) for row in rows), 1)
        width = page_bucket(pages, self.spec.page_size, self.dcp_size, self.spec.pages)
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

    def _to_host(self, output, rows, received, reruns) -> StepResult:
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
