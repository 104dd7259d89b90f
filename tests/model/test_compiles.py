"""A bucket is compiled once, its program is one for all ranks, and its bits never change."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from dcp_jax.engine.runner import Row, Runner
from dcp_jax.testing.harness import advance, deal, open_runner

W = 4


@pytest.fixture(scope="module")
def directory(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(
        num_hidden_layers=2, indexer_types=["full", "shared"], mlp_layer_types=["dense", "sparse"]
    )


@pytest.fixture
def compiled(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Names of the functions that XLA compiled since the last call, from JAX's own log."""
    jax.config.update("jax_log_compiles", True)
    caplog.set_level(logging.DEBUG, "jax")

    def names() -> list[str]:
        found = [
            match.group(1)
            for record in caplog.records
            if (match := re.match(r"Finished XLA compilation of (\S+)", record.getMessage()))
        ]
        caplog.clear()
        return found

    yield names
    jax.config.update("jax_log_compiles", False)


def open_four(directory: Path) -> Runner:
    return open_runner(directory, tp=W, dcp_size=W, tokens=512)


def test_decode_compiles_once_per_bucket(no_compilation_cache, directory: Path, compiled):
    """100 steps over pages and page boundaries, then another bucket: two programs."""
    runner = open_four(directory)
    sequences = deal(runner, [[3, 4, 5], [6], [7, 8]], room=104)
    advance(runner, sequences)
    compiled()
    for _ in range(100):
        advance(runner, sequences)
    assert compiled() == ["jit(step)"]
    assert max(s.cached for s in sequences) > 6 * 4 * W, "several pages long by now"
    assert runner.programs == 2
    # Two rows still fit the bucket of four; one is a bucket of its own.
    advance(runner, sequences[:2])
    assert compiled() == []
    advance(runner, sequences[:1])
    assert compiled() == ["jit(step)"]
    advance(runner, sequences[1:2])
    assert compiled() == []


def test_steps_repeat_bit_for_bit(directory: Path):
    """20 runs of a prefill and of a decode step from the same caches."""
    runner = open_four(directory)
    prompt = np.random.default_rng(2).integers(2, 64, 40).tolist()
    runs = set()
    for _ in range(20):
        (sequence,) = deal(runner, [prompt], room=2)
        results = [advance(runner, [sequence], logits="all") for _ in range(2)]
        runs.add(tuple(result.logits.tobytes() for result in results))
    assert len(runs) == 1


def test_all_ranks_run_one_program(directory: Path):
    """No rank has a program of its own; `test_collectives` sees that no exchange is in a branch."""
    runner = open_four(directory)
    lowered = runner.trace([Row([1], 0, [0])]).lower()
    assert f"mhlo.num_partitions = {W} : i32, mhlo.num_replicas = 1 : i32" in lowered.as_text()
    compiled = lowered.compile()
    assert len(compiled.runtime_executable().hlo_modules()) == 1
    assert f"num_partitions={W}" in compiled.as_text().splitlines()[0]
