"""Turns of the timing, agreement of outputs and of selected sets, records on disk."""

import jax.numpy as jnp
import numpy as np
import pytest

from dcp_jax import bench
from dcp_jax.bench.measure import agreement, near_ties, sample_of, selected_sets, time_runs
from dcp_jax.layers.indexer import Selection
from dcp_jax.policy import PrefillPath


def test_runs_take_turns_and_the_median_counts():
    """A clock that only the runs move: each takes its number, and one of them stumbles once."""
    now, order = [0.0], []

    def run(name, seconds):
        def once():
            order.append(name)
            now[0] += 100 if order.count("b") == 2 == len(order) - 2 else seconds

        return once

    runs = {"a": run("a", 1.0), "b": run("b", 2.0), "c": run("c", 3.0)}
    times = time_runs(runs, 3, clock=lambda: now[0])
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {key: t.median for key, t in times.items()} == {"a": 1, "b": 2, "c": 3}
    assert (times["b"].fastest, times["b"].slowest, times["b"].repeats) == (2, 100, 3)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 4096])
def test_sampled_tokens_are_spread_from_first_to_last(tokens: int):
    sampled = sample_of(tokens)
    assert sampled[0] == 0
    assert sampled[-1] == tokens - 1
    assert len(sampled) == min(tokens, 64)


def outputs(shape=(1, 100, 16)):
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape).astype(np.float32), np.ones(shape[:2], bool)


@pytest.mark.parametrize(
    ("exact", "tokens_off", "error", "agrees"),
    [
        (False, 10, 0.1, True),
        (False, 11, 0.1, False),
        (False, 100, 0.02, True),
        (False, 10, 3.0, False),  # the cosine falls below 0.99
        (True, 3, 1e-3, True),
        (True, 4, 1e-3, False),
        (True, 100, 5e-5, True),
        (True, 1, np.nan, True),
        (False, 0, 0.0, True),
    ],
)
def test_limits_of_the_outputs(exact: bool, tokens_off: int, error: float, agrees: bool):
    reference, valid = outputs()
    y = reference.copy()
    y[0, :tokens_off] *= 1 + error
    if error == 3.0:
        y[0, :tokens_off] *= -1
    found = agreement(
        jnp.asarray(y), jnp.asarray(reference), PrefillPath.GATHERED, valid, exact=exact
    )
    assert found.agrees == (agrees and not np.isnan(error))
    limit = 1e-4 if exact else 0.03
    assert found.off == pytest.approx(tokens_off / 100 if not error <= limit else 0)


def test_padding_is_not_compared():
    reference, valid = outputs()
    valid[0, 50:] = False
    y = np.where(valid[..., None], reference, np.nan)
    found = agreement(*map(jnp.asarray, (y, reference)), PrefillPath.OWNED, valid, exact=True)
    assert found.agrees
    assert found.worst == 0


@pytest.mark.parametrize(
    ("exact", "ties", "unequal", "agrees"),
    [(True, [0, 0, 0], 1, False), (True, [0, 1, 0], 0, True), (False, None, 1, True)],
)
def test_selected_sets_agree_outside_near_ties(exact, ties, unequal, agrees):
    reference, valid = outputs()
    sets = [np.array([0, 1]), np.array([2, 5]), np.array([3, 4])]
    others = [sets[0], np.array([2, 6]), sets[2]]
    same = jnp.asarray(reference)
    found = agreement(
        *(same, same, PrefillPath.OWNED, valid),
        exact=exact,
        sets=(others, sets),
        ties=None if ties is None else np.array(ties, bool),
    )
    assert (found.sampled, found.unequal_sets, found.agrees) == (3, unequal, agrees)
    assert found.missed == pytest.approx(1 / 6)


def test_uncertified_tokens_do_not_agree():
    reference, valid = outputs()
    same = jnp.asarray(reference)
    found = agreement(same, same, PrefillPath.OWNED, valid, exact=True, uncertified=1)
    assert not found.agrees


def test_near_ties_are_relative_to_the_spread():
    scores = np.array(
        [
            [10.0, 5.0, 4.9, 0.0],  # clear
            [10.0, 5.0, 4.9999, 0.0],  # margin 1e-5 of the spread
            [10.0, 5.0, -np.inf, -np.inf],  # nothing left out
            [10.0, 5.0, 5.0, -np.inf],
        ],
        np.float32,
    )
    visible = np.array([4, 4, 2, 3])
    assert near_ties(scores, visible, 2).tolist() == [False, True, False, True]
    assert near_ties(scores, visible, 4).tolist() == [False] * 4


def test_selected_sets_of_every_path_are_positions():
    """Rank 1 of 2 owns the odd positions; a gathered selection is whole on both ranks."""

    def selection_of(index, counts) -> Selection:
        index, counts = jnp.array(index)[:, None, None], jnp.array(counts)[:, None, None]
        return Selection(index, None, counts, jnp.ones_like(counts, bool))

    owned = selection_of([[2, 0, 9], [1, 9, 9]], [2, 1])
    gathered = selection_of([[0, 3, 4], [0, 3, 4]], [3, 3])
    tokens = np.array([0])
    for selection, path in ((owned, PrefillPath.OWNED), (gathered, PrefillPath.GATHERED)):
        (found,) = selected_sets(selection, path, tokens, rows=1)
        assert found.tolist() == [0, 3, 4]


def test_files_that_hold_no_records_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        bench.read_records(tmp_path / "none.jsonl")
    (tmp_path / "odd.jsonl").write_text('{"setup": 1}\n')
    with pytest.raises(ValueError, match=r"odd\.jsonl, line 1 is no record of bench prefill"):
        bench.read_records(tmp_path / "odd.jsonl")
