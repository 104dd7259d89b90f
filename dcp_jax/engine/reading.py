"""Which path a prefill takes, and prompts that are only read: for scores and explanations."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dcp_jax.engine.runner import Row, Runner, StepResult
from dcp_jax.layers.sizes import Sizes
from dcp_jax.mesh import tp_size
from dcp_jax.policy import PrefillPath, PrefillPolicy, choose_path


class Chunk(NamedTuple):
    """One step of a prefill: positions start..start+length-1 of the prompt."""

    start: int
    length: int
    path: PrefillPath
    result: StepResult


def prefill_path(
    runner: Runner, policy: PrefillPolicy, prefixes: Sequence[int], extends: Sequence[int]
) -> PrefillPath:
    """Path of a batch of chunks: tokens cached before each, and new tokens of each."""
    if runner.dcp_size == 1:
        return PrefillPath.OWNED  # one rank owns every row: both paths are the same program
    model = runner.model
    tp = tp_size(model.mesh)
    return choose_path(
        policy,
        prefix_tokens=sum(prefixes),
        extend_tokens=sum(extends),
        gathered_heads=Sizes.padded(model.cfg, tp).heads * runner.dcp_size // tp,
    )


def possible_paths(policy: PrefillPolicy, dcp_size: int) -> tuple[PrefillPath, ...]:
    """The paths that `prefill_path` can choose: what the ladder is compiled for."""
    if dcp_size == 1:
        return (PrefillPath.OWNED,)
    return tuple(PrefillPath) if policy.force is None else (policy.force,)


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
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        path = prefill_path(runner, policy, [start], [len(part)])
        result = runner.step([Row(part, start, pages)], path=path, **changes)
        yield Chunk(start, len(part), path, result)
