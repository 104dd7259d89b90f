"""Launches the engine's steps without waiting for them, on the slots.

One launch is one executable over rows of one kind: a chunk of a few prompts, or one or several
decode steps of every running request. Launches run in their order, so a request may be launched
again before its token was read: the token is in its slot.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from tqdm.auto import tqdm

from dcp_jax.engine.ladder import Bucket, Ladder, Sampler, full_width
from dcp_jax.engine.programs import NOTED, Programs, arguments
from dcp_jax.engine.runner import Runner
from dcp_jax.engine.sampler import Sampled
from dcp_jax.engine.served import HEADER, Drawn
from dcp_jax.engine.slots import Knobs, Slots, default_knobs, fresh_slots
from dcp_jax.layers.stacked import stack
from dcp_jax.policy import PrefillPath

logger = logging.getLogger(__name__)

FROM_SLOT = -1  # a decode row's token that only the devices know yet


class DecodeRow(NamedTuple):
    """A running request: its newest token (or `FROM_SLOT`), tokens cached, steps, pages."""

    slot: int
    token: int
    start: int
    steps: int
    pages: Sequence[int]


class ChunkRow(NamedTuple):
    """A part of a prompt: its tokens, how many come before it, pages; `last` draws a token."""

    slot: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    last: bool


class Launch(NamedTuple):
    """An executable on its way, with what is needed to launch it again.

    Attributes:
        drawn: results, on the devices.
        wanted: sizes it was launched for (it may run in larger ones).
        count: real rows.
        tokens: int32 [B, T]; inputs: int32 [B, 4 + P]: what it was given.
    """

    drawn: Drawn
    wanted: Bucket
    count: int
    tokens: np.ndarray
    inputs: np.ndarray


class Executor:
    """Owner of the slots; the caches are the runner's.

    Attributes:
        ladder: sizes that steps are compiled for.
        decode_steps: tokens that a decode launch draws for each row, at most.
        nobody: the slot that no request has.
        params: of the model, small ones stacked.
        programs: the ladder's executables.
    """

    def __init__(self, runner: Runner, ladder: Ladder, *, slots: int, decode_steps: int = 1):
        self.runner = runner
        self.ladder = ladder
        self.decode_steps = decode_steps
        self.nobody = slots
        self.params = stack(runner.params)
        self._slots = self._fresh()
        self.programs = Programs(runner, self.params, self._slots, decode_steps)
        self._tables = np.full((slots + 1, ladder.pages[-1]), -1, np.int32)
        self._known = [0] * (slots + 1)

    # -- slots ---------------------------------------------------------------------------------

    def assign(
        self,
        slot: int,
        knobs: Knobs | None = None,
        *,
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
    ) -> None:
        """A request takes a slot.

        Args:
            slot: of the request.
            knobs: its sampling parameters; None for a greedy one in a slot that never had others.
            prompt: its prompt, if penalties look at it.
            generated: what it generated before, likewise.
        """
        self._tables[slot] = -1
        self._known[slot] = 0
        if knobs is None:
            return
        self._slots = self.programs.load(self._slots, np.int32(slot), knobs)
        for start in range(0, max(len(prompt), len(generated)), NOTED):
            parts = [_noted(tokens[start : start + NOTED]) for tokens in (prompt, generated)]
            self._slots = self.programs.note(self._slots, np.int32(slot), *parts)

    def reset(self) -> None:
        """Empty caches and slots, after a launch that took them with it."""
        self.runner.reset()
        self._slots = self._fresh()
        self._tables[:] = -1
        self._known = [0] * len(self._known)

    def _fresh(self) -> Slots:
        return fresh_slots(self.nobody, self.runner.model.cfg.vocab_size, self.runner.model.mesh)

    # -- launches ------------------------------------------------------------------------------

    def decode(self, rows: Sequence[DecodeRow], sampler: Sampler) -> Launch:
        """Up to `decode_steps` tokens for each row; `sampler` is what the rows need to draw."""
        pages = max(len(row.pages) for row in rows)
        wanted = self.ladder.decode(len(rows), pages, sampler)
        tokens = np.array([[row.token] for row in rows], np.int32)
        header = [(row.slot, row.start, row.steps, row.slot) for row in rows]
        return self._launch(wanted, tokens, self._inputs(rows, header, wanted.pages))

    def prefill(self, rows: Sequence[ChunkRow], path: PrefillPath) -> Launch:
        """A chunk of each row's prompt; at most as many rows as `rows_together` says."""
        longest = max(len(row.tokens) for row in rows)
        wanted = self.ladder.prefill(longest, max(len(row.pages) for row in rows), path)
        if self.programs.warm:
            wanted = replace(wanted, rows=len(rows))
        tokens = np.zeros((len(rows), longest), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = row.tokens
        header = [
            (row.slot, row.start, len(row.tokens), row.slot if row.last else self.nobody)
            for row in rows
        ]
        return self._launch(wanted, tokens, self._inputs(rows, header, wanted.pages))

    def rows_together(self, tokens: int, pages: int, path: PrefillPath) -> int:
        """How many chunks of at most `tokens` tokens one launch takes now."""
        wanted = self.ladder.prefill(tokens, pages, path)
        if not self.programs.warm or self.programs.holds(wanted):
            return wanted.rows
        return 1

    def again(self, launch: Launch, newest: Sequence[int], gone: Sequence[bool]) -> Launch:
        """The same launch in full width: its rows are written anew.

        Args:
            launch: whose pruned candidates were not certified.
            newest: of a decode, the token that each row had before it.
            gone: rows that have lost their pages since: they touch nothing.
        """
        self.runner.reruns += 1
        logger.info("pruned candidates were not certified: %s runs again", launch.wanted.name)
        tokens = launch.tokens
        if launch.wanted.decode:
            tokens = np.array(newest, np.int32)[:, None]
        inputs = launch.inputs.copy()
        inputs[np.array(gone), :HEADER] = (self.nobody, 0, 0, self.nobody)
        return self._launch(full_width(launch.wanted), tokens, inputs)

    def read(self, launch: Launch) -> tuple[Sampled, np.ndarray]:
        """Wait for a launch: numpy [N, rows] of tokens and more, and which rows are certified."""
        sampled = jax.tree.map(lambda a: np.asarray(a)[:, : launch.count], launch.drawn.sampled)
        return sampled, np.asarray(launch.drawn.certified)[: launch.count]

    def _inputs(self, rows, header: list[tuple[int, ...]], width: int) -> np.ndarray:
        """Rows as the devices read them: [rows, 4 + width].

        Page tables stay on the host by slot, so that a row only appends what it got since.
        """
        for row in rows:
            known, count = self._known[row.slot], len(row.pages)
            if count > known:
                self._tables[row.slot, known:count] = row.pages[known:]
                self._known[row.slot] = count
        tables = self._tables[[row.slot for row in rows], :width]
        return np.concatenate([np.array(header, np.int32), tables], axis=1)

    def _launch(self, wanted: Bucket, tokens: np.ndarray, inputs: np.ndarray) -> Launch:
        bucket = self.programs.ready(wanted)
        drawn = self._run(bucket, *self._padded(bucket, tokens, inputs))
        for leaf in jax.tree.leaves(drawn):
            leaf.copy_to_host_async()
        return Launch(drawn, wanted, len(tokens), tokens, inputs)

    def _padded(self, bucket: Bucket, tokens, inputs) -> tuple[np.ndarray, np.ndarray]:
        """Arrays of the bucket's sizes; rows without tokens belong to nobody and touch nothing."""
        all_tokens = np.zeros((bucket.rows, bucket.tokens), np.int32)
        all_inputs = np.full((bucket.rows, HEADER + bucket.pages), -1, np.int32)
        all_inputs[:, :HEADER] = (self.nobody, 0, 0, self.nobody)
        if len(tokens):
            all_tokens[: len(tokens), : tokens.shape[1]] = tokens
            all_inputs[: len(tokens), : inputs.shape[1]] = inputs
        return all_tokens, all_inputs

    def _run(self, bucket: Bucket, tokens: np.ndarray, inputs: np.ndarray) -> Drawn:
        program, slots = self.programs.compiled[bucket], self._slots
        carry, fixed = arguments(self.runner.cache, slots, bucket.sampler)
        drawn, carry = program(self.params, carry, fixed, tokens, inputs)
        generated = slots.generated if carry.generated is None else carry.generated
        self.runner.cache = carry.cache
        self._slots = slots._replace(token=carry.token, generated=generated)
        return drawn

    # -- executables ---------------------------------------------------------------------------

    def warm_up(self, *, use_tqdm: bool = True) -> None:
        """Compile what every step can run in, run it once, then compile the rest meanwhile.

        From now on a step never waits for its own bucket: it runs in a larger one.
        """
        self.programs.close()
        first = self.ladder.largest()
        for bucket in tqdm(first, desc="compile", unit="step", disable=not use_tqdm):
            self.programs.ready(bucket)
            # The first collective of each size sets up its channels: not during a request.
            jax.block_until_ready(self._run(bucket, *self._padded(bucket, (), ())))
        self.assign(self.nobody, default_knobs(), prompt=(0,))
        rest = self.ladder.buckets()
        if self.runner.dcp_size > 1:
            rest += [full_width(b) for b in first if b.path is PrefillPath.OWNED]
        self.programs.compile_meanwhile(rest)

    def wait_compiled(self) -> None:
        """Wait until the whole ladder is compiled."""
        self.programs.wait()

    def close(self) -> None:
        """Stop compiling in the background; waits for the executable in progress."""
        self.programs.close()


def _noted(tokens: Sequence[int]) -> np.ndarray:
    array = np.full(NOTED, -1, np.int32)
    array[: len(tokens)] = tokens
    return array
