"""Prompts that are only read, chunk by chunk: for scores and explanations."""

from collections.abc import Iterator
from typing import NamedTuple

from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.paths import parallelism, prefill_options
from dcp_jax.engine.runner import Row, Runner, StepResult
from dcp_jax.policy import PrefillPath, PrefillPolicy


class Chunk(NamedTuple):
    """One step of a prefill: positions start..start+length-1 of the prompt."""

    start: int
    length: int
    path: PrefillPath
    result: StepResult


def read_prompt(
    runner: Runner,
    policy: PrefillPolicy,
    tokens: list[int],
    pages: list[int],
    *,
    chunk: int,
    **changes,
) -> Iterator[Chunk]:
    """Prefill chunk by chunk and wait for each; nothing else may be on its way.

    Args:
        runner: of the engine.
        policy: chooses the path of each chunk.
        tokens: the prompt.
        pages: its pages.
        chunk: tokens at a time.
        **changes: fields of `StepOptions`.
    """
    group = parallelism(runner.model)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        how = prefill_options(policy, group, [start], [len(part)])
        # The dense path reads every page of its table: none that later chunks will fill.
        dense = how["path"] is PrefillPath.MHA_ONE_SHOT
        needed = pages_needed(start + len(part), runner.spec.page_size, runner.dcp_size)
        row = Row(part, start, pages[:needed] if dense else pages)
        result = runner.step([row], **how, **changes)
        yield Chunk(start, len(part), how["path"], result)
