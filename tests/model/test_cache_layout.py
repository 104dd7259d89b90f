"""Which rows of the caches a step writes and reads: all pools hold NaN before anything runs.

Every case runs a ragged batch with padding rows and free pages around it, so a row written by
mistake, or one read that holds no token of the sequence, shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcp_jax.cache.pool import init_cache
from dcp_jax.engine.runner import Runner
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import Sequence, advance, cached_rows, deal

LENGTHS = (1, 2, 3, 7, 8, 9)
STEPS = 3
LEAVES = {"latent": 2, "k_pe": 2, "index_k": 2}  # and the layers that have them
OWNED, GATHERED = PrefillPath.OWNED, PrefillPath.GATHERED


@dataclass(frozen=True)
class Case:
    id: str
    tp: int
    dcp: int
    path: PrefillPath
    index_cache: str = "sharded"
    page_size: int = 2

    @property
    def runner(self) -> dict:
        return {
            "tp": self.tp,
            "dcp_size": self.dcp,
            "page_size": self.page_size,
            "index_cache": self.index_cache,
            "tokens": 320,
        }


CASES = [
    Case("w8_owned", 8, 8, OWNED),
    Case("w8_gathered", 8, 8, GATHERED),
    Case("w8_replicated_owned", 8, 8, OWNED, "replicated"),
    Case("w2_of_tp4_gathered", 4, 2, GATHERED, page_size=1),
    Case("w3_owned", 3, 3, OWNED, page_size=3),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(2, 64, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def open_case(checkpoint: Callable[..., Path], runners: Callable[..., Runner]):
    directory = checkpoint(
        index_topk=4,
        num_hidden_layers=2,
        indexer_types=["full"] * 2,
        mlp_layer_types=["sparse", "dense"],
    )
    return lambda **options: runners(directory, **options)


def poison(runner: Runner) -> None:
    """NaN in every row of every cache."""
    runner.cache = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype, device=leaf.sharding),
        init_cache(runner.spec, runner.model.mesh),
    )


def generate(runner: Runner, sequences: list[Sequence], path: PrefillPath) -> list[np.ndarray]:
    """Prefill and `STEPS` decode steps; the logits of each."""
    results = [advance(runner, sequences, path=path, logits="last")]
    results += [advance(runner, sequences, logits="last") for _ in range(STEPS)]
    return [result.logits for result in results]


@pytest.fixture(scope="module")
def reference(open_case, prompts):
    """One rank, with pages in order: logits, tokens and the rows of the caches."""
    runner = open_case(tokens=320, page_size=4)
    sequences = deal(runner, prompts, room=STEPS, seed=None)
    logits = generate(runner, sequences, OWNED)
    rows = {
        (leaf, layer, i): cached_rows(runner, sequence, leaf, layer)
        for leaf, layers in LEAVES.items()
        for layer in range(layers)
        for i, sequence in enumerate(sequences)
    }
    return logits, [s.tokens for s in sequences], rows


def written_rows(runner: Runner, sequences: list[Sequence], leaf: str) -> np.ndarray:
    """bool [rows of all ranks' pools], True where a token of the sequences must stand."""
    spec, W = runner.spec, runner.dcp_size
    replicated = leaf.startswith("index") and spec.index_replicated
    ranks, page_size = (1, spec.page_size * W) if replicated else (W, spec.page_size)
    pool = np.zeros((ranks, LEAVES[leaf], spec.pages, page_size), bool)
    for sequence in sequences:
        for position in range(sequence.cached):
            page = sequence.pages[position // (spec.page_size * W)]
            place = position % (spec.page_size * W)
            rank, row = (0, place) if replicated else (place % W, place // W)
            pool[rank, :, page, row] = True
    return pool.reshape(-1)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_exactly_the_tokens_rows_are_written(open_case, prompts, reference, case: Case):
    """Each in its owner's pool, with the values of one rank; all other rows keep their NaN."""
    logits, tokens, rows = reference
    runner = open_case(**case.runner)
    poison(runner)
    sequences = deal(runner, prompts, room=STEPS, seed=case.dcp)
    for mine, wanted in zip(generate(runner, sequences, case.path), logits, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-4)
    assert [s.tokens for s in sequences] == tokens
    for leaf in LEAVES:
        pool = np.asarray(getattr(runner.cache, leaf))
        finite = np.isfinite(pool)
        assert (finite.all(axis=1) == finite.any(axis=1)).all()
        np.testing.assert_array_equal(finite.all(axis=1), written_rows(runner, sequences, leaf))
        # Ranks that hold the same rows (other heads, or a replicated cache) hold the same bits.
        shards = getattr(runner.cache, leaf).addressable_shards
        for shard in shards:
            first = next(s for s in shards if s.index == shard.index)
            assert np.asarray(shard.data).tobytes() == np.asarray(first.data).tobytes()
    for (leaf, layer, i), wanted in rows.items():
        got = cached_rows(runner, sequences[i], leaf, layer)
        # Layer 0 comes before any sum over ranks: the very same bits.
        np.testing.assert_allclose(got, wanted, atol=0 if layer == 0 else 1e-4)


def test_one_token_leaves_all_other_rows_bit_for_bit(open_case, prompts):
    """Decode of six sequences in a bucket of 16 rows: each rank changes its own rows only."""
    case = CASES[0]
    runner = open_case(**case.runner)
    poison(runner)
    sequences = deal(runner, prompts, room=STEPS, seed=1)
    last_page = runner.spec.pages - 1
    assert all(last_page not in s.pages for s in sequences), "what -1 would write to is free"
    advance(runner, sequences, path=case.path, logits="last")
    before = {leaf: np.asarray(getattr(runner.cache, leaf)).view(np.uint32) for leaf in LEAVES}
    old = {leaf: written_rows(runner, sequences, leaf) for leaf in LEAVES}
    advance(runner, sequences, logits="last")
    for leaf in LEAVES:
        changed = (np.asarray(getattr(runner.cache, leaf)).view(np.uint32) != before[leaf]).any(1)
        new = written_rows(runner, sequences, leaf) & ~old[leaf]
        np.testing.assert_array_equal(changed, new)
        assert new.sum() == len(prompts) * LEAVES[leaf]
        # Positions 1, 2, 3, 7, 0 and 1 mod 8: some ranks own none of the new tokens.
        owners = set(np.flatnonzero(new) // (len(new) // runner.dcp_size))
        assert owners == {n % 8 for n in LENGTHS}


def test_pages_may_stand_anywhere(open_case, prompts):
    """Other pages, and a pool full of what others left there: the same bits."""
    runner = open_case(**CASES[0].runner)
    runs = []
    for seed in (None, 2, 3):
        sequences = deal(runner, prompts, room=STEPS, seed=seed)
        runs.append(generate(runner, sequences, CASES[0].path))
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0], other)


def test_neighbours_in_the_batch_do_not_matter(open_case, prompts):
    """A row's logits are those that it has beside padding rows only, bit for bit."""
    runner = open_case(**CASES[0].runner)
    poison(runner)
    sequences = deal(runner, prompts, room=STEPS, seed=4)
    together = advance(runner, sequences, path=OWNED, logits="last").logits
    # Five rows fill the same bucket as six, and three of these hold another text.
    others = [p[::-1] for p in prompts[:3]]
    sequences = deal(runner, [prompts[5], *others, prompts[4]], room=STEPS, seed=5)
    mixed = advance(runner, sequences, path=OWNED, logits="last").logits
    np.testing.assert_array_equal(mixed[[0, 4]], together[[5, 4]])
