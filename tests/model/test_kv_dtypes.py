"""bfloat16 and e4m3 caches: as far from float32 as their rounding, and the same for every W."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dcp_jax.engine.runner import Runner
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import advance, cached_rows, deal, open_runner, selected_sets

LENGTHS = (48, 33)
# Three steps of one program: a prompt's first part, its middle, and its end beside a decode.
STEPS = ((16, 16), (16, 16), (16, 1))
PATHS = {
    "bfloat16": {1: "owned", 2: "owned", 3: "gathered", 4: "owned", 8: "gathered"},
    "fp8_e4m3": {1: "owned", 2: "gathered", 3: "owned", 4: "gathered", 8: "owned"},
}
LEAVES = {"latent": 2, "scale": 2, "k_pe": 2, "index_k": 2, "index_scale": 2}


@dataclass(frozen=True)
class Run:
    """Logits [tokens, vocab], selected sets of layer 0, and the rows of the caches by position."""

    logits: np.ndarray
    sets: list[set[int]]
    rows: dict[tuple[str, int], np.ndarray]


def run(runner: Runner, seed: int) -> Run:
    rng = np.random.default_rng(13)
    prompts = [rng.integers(2, 64, n).tolist() for n in LENGTHS]
    sequences = deal(runner, prompts, room=4, seed=seed)
    logits, sets = [], []
    for counts in STEPS:
        result = advance(runner, sequences, counts, logits="all", explain=True)
        for row, count in enumerate(counts):
            logits.append(result.logits[row, :count])
            for token in range(count):
                sets.append(set().union(*selected_sets(result.explanation, 0, row, token)))
    rows = {
        (leaf, layer): np.concatenate([cached_rows(runner, s, leaf, layer) for s in sequences])
        for leaf, layers in LEAVES.items()
        if getattr(runner.cache, leaf) is not None
        for layer in range(layers)
    }
    return Run(np.concatenate(logits), sets, rows)


@pytest.fixture(scope="module")
def run_dense(checkpoint: Callable[..., Path]) -> Callable[..., Run]:
    """A model without discrete choices: every key is selected, every layer dense."""
    directory = checkpoint(index_topk=64, mlp_layer_types=["dense"] * 3)
    return lambda kv_dtype: run(open_runner(directory, kv_dtype=kv_dtype), 0)


@pytest.fixture(scope="module")
def run_sparse(checkpoint: Callable[..., Path]) -> Callable[..., Run]:
    """A model that selects 16 of up to 48 keys, and experts."""
    directory = checkpoint(
        index_topk=16,
        num_hidden_layers=2,
        indexer_types=["full"] * 2,
        mlp_layer_types=["sparse", "dense"],
    )
    done: dict[tuple, Run] = {}

    def one(W: int, kv_dtype: str, **options: Any) -> Run:
        key = (W, kv_dtype, *options.items())
        if key not in done:
            options = {"path": PrefillPath(PATHS.get(kv_dtype, {}).get(W, "owned")), **options}
            runner = open_runner(
                directory, tp=W, dcp_size=W, tokens=192, kv_dtype=kv_dtype, **options
            )
            done[key] = run(runner, W)
        return done[key]

    return one


def test_distance_from_a_float32_cache(run_dense):
    """Logits have a deviation of 2; measured: 0.04 and 0.31 at most, 0.004 and 0.05 in the mean."""
    exact = run_dense("float32").logits
    for kv_dtype, most, mean in (("bfloat16", 0.1, 0.01), ("fp8_e4m3", 0.6, 0.1)):
        error = np.abs(run_dense(kv_dtype).logits - exact)
        assert 0 < error.max() < most
        assert error.mean() < mean


@pytest.mark.slow
@pytest.mark.parametrize("W", [2, 3, 4, 8])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_caches_equal_one_ranks_bytes(run_sparse, W: int, kv_dtype: str):
    """Layer 0 bit for bit, scales included; later layers but for values that sit on a boundary."""
    one, many = run_sparse(1, kv_dtype), run_sparse(W, kv_dtype)
    assert many.rows.keys() == one.rows.keys()
    assert len(one.rows) == (10 if kv_dtype == "fp8_e4m3" else 6)
    for (leaf, layer), wanted in one.rows.items():
        got = many.rows[leaf, layer]
        if layer == 0:
            assert got.tobytes() == wanted.tobytes(), leaf
        elif got.dtype == np.float32:
            np.testing.assert_allclose(got, wanted, rtol=1e-4)
        else:
            assert (got == wanted).mean() > 0.99
    assert many.sets == one.sets
    # One bfloat16 value that rounds the other way moves logits by 0.003.
    np.testing.assert_allclose(many.logits, one.logits, atol=0.02)


def test_hadamard_turns_index_keys_and_nothing_else(run_sparse):
    """The rotation is orthogonal: in float32 scores, so selections, stay what they are."""
    plain, turned = (run_sparse(4, "float32", index_hadamard=on) for on in (False, True))
    assert turned.sets == plain.sets
    np.testing.assert_allclose(turned.logits, plain.logits, atol=1e-4)
    matrix = np.ones((1, 1))
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    keys = plain.rows["index_k", 0]
    np.testing.assert_allclose(turned.rows["index_k", 0], keys @ matrix / 4, atol=1e-5)
    np.testing.assert_array_equal(turned.rows["latent", 0], plain.rows["latent", 0])


def test_hadamard_is_on_for_e4m3_unless_switched_off(run_sparse):
    """Switched off, the cached index keys are those of a float32 cache, rounded."""
    exact = run_sparse(4, "float32", index_hadamard=False).rows["index_k", 0]
    on = run_sparse(4, "fp8_e4m3").rows
    off = run_sparse(4, "fp8_e4m3", index_hadamard=False).rows
    values = off["index_k", 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    keys = values * off["index_scale", 0][:, None]
    np.testing.assert_allclose(keys, exact, rtol=1 / 16, atol=0.01)
    assert (off["index_k", 0] != on["index_k", 0]).mean() > 0.5
    assert off["latent", 0].tobytes() == on["latent", 0].tobytes()
