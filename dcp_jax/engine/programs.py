"""The ladder's executables: compiled when first needed, or ahead of time in the background."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dcp_jax.engine.ladder import Bucket, Sampler, smallest_holding
from dcp_jax.engine.runner import Runner
from dcp_jax.engine.served import (
    HEADER,
    SAMPLER_OPTIONS,
    Carry,
    Fixed,
    serve_decode,
    serve_prefill,
)
from dcp_jax.engine.slots import Slots, default_knobs, load_slot, note_tokens
from dcp_jax.layers.stacked import Stacked

logger = logging.getLogger(__name__)

NOTED = 1024  # tokens that `note` takes at a time


class Programs:
    """Executables of one runner, by bucket.

    Attributes:
        compiled: those that are ready.
        warm: a step runs in a larger bucket rather than wait for its own to be compiled.
    """

    def __init__(self, runner: Runner, params: Stacked, slots: Slots, decode_steps: int):
        self.compiled: dict[Bucket, Any] = {}
        self.warm = False
        self._runner = runner
        self._decode_steps = decode_steps
        # Shapes and shardings: what is compiled in the background must not hold live arrays.
        self._shapes = _shapes((params, runner.cache, slots))
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def compiling(self) -> bool:
        """Whether executables are being compiled in the background."""
        return self._thread is not None and self._thread.is_alive()

    def holds(self, wanted: Bucket) -> bool:
        """Whether a step of `wanted` can run in what is compiled."""
        return smallest_holding(wanted, list(self.compiled)) is not None

    def ready(self, wanted: Bucket) -> Bucket:
        """A compiled bucket for a step: its own, else a larger one, else its own compiled now."""
        if wanted in self.compiled:
            return wanted
        larger = smallest_holding(wanted, list(self.compiled)) if self.warm else None
        if larger is None:
            self.compiled[wanted] = self._compile(wanted)
        return larger or wanted

    def compile_meanwhile(self, buckets: Sequence[Bucket]) -> None:
        """Compile buckets on a thread, in their order; steps run in what is compiled already."""
        self.warm = True
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._compile_all, args=(buckets,), name="dcp-jax-compile", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread has compiled everything."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End the thread; waits for the executable in progress."""
        self._stop.set()
        self.wait()
        self._thread = None

    @cached_property
    def load(self) -> Any:
        """`slots.load_slot`, compiled."""
        return self._small(load_slot, _shapes(default_knobs()))

    @cached_property
    def note(self) -> Any:
        """`slots.note_tokens`, compiled for `NOTED` tokens."""
        tokens = jax.ShapeDtypeStruct((NOTED,), np.int32)
        return self._small(note_tokens, tokens, tokens)

    def _compile_all(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if self._stop.is_set():
                return
            if bucket not in self.compiled:
                try:
                    self.compiled[bucket] = self._compile(bucket)
                except Exception:
                    # Steps go on in the larger buckets that are compiled.
                    logger.exception("%s could not be compiled in the background", bucket.name)
                    return

    def _compile(self, bucket: Bucket) -> Any:
        runner = self._runner
        params, cache, slots = self._shapes
        carry, fixed = arguments(cache, slots, bucket.sampler)
        opts = replace(runner.opts, path=bucket.path)
        if bucket.full_width:
            opts = replace(opts, candidates="full")
        static = (runner.model, runner.spec, opts, bucket.sampler)
        serve = (
            partial(serve_decode, *static, self._decode_steps)
            if bucket.decode
            else partial(serve_prefill, *static)
        )
        tokens = jax.ShapeDtypeStruct((bucket.rows, bucket.tokens), np.int32)
        rows = jax.ShapeDtypeStruct((bucket.rows, HEADER + bucket.pages), np.int32)
        # Results keep the shardings of what they replace, so that the next launch takes them.
        everywhere = NamedSharding(runner.model.mesh, PartitionSpec())
        compiled = runner.compile(
            serve,
            *(params, carry, fixed, tokens, rows),
            donate=1,
            out_shardings=(everywhere, _shardings(carry)),
        )
        logger.info("compiled %s", bucket.name)
        return compiled

    def _small(self, function: Any, *args: Any) -> Any:
        slots, number = self._shapes[2], jax.ShapeDtypeStruct((), np.int32)
        return self._runner.compile(
            function, slots, number, *args, donate=0, out_shardings=_shardings(slots)
        )


def arguments(cache: Any, slots: Slots, sampler: Sampler) -> tuple[Carry, Fixed]:
    """What an executable of this sampler takes of the slots (or of their shapes)."""
    options = SAMPLER_OPTIONS[sampler]
    counted = options is not None and options.penalties
    carry = Carry(cache, slots.token, slots.generated if counted else None)
    return carry, Fixed(
        None if options is None else slots.knobs, slots.in_prompt if counted else None
    )


def _shapes(tree: Any) -> Any:
    def shape(leaf):
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)
