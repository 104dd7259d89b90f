"""The global top-k: one total order, the same set for every W, on every rank, bit for bit."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import reference
from pallas_kernels.topk import (
    Candidates,
    candidate_capacity,
    join_candidates,
    local_topk,
    merge_candidates,
    pack_candidates,
    score_keys,
    unpack_candidates,
)

S = 24
SIZES = (1, 2, 3, 4, 8)
naive_counts = jax.jit(reference.merge_counts, static_argnums=(2, 3))
naive_topk = jax.jit(reference.local_topk, static_argnums=2)
INF, NAN = float("inf"), float("nan")


def oracle(scores: np.ndarray, n: int, k: int) -> list[int]:
    """Positions of the best k of the first n scores, ascending."""
    value = [-INF if np.isnan(s) else float(s) for s in scores[:n]]
    return sorted(sorted(range(n), key=lambda p: (-value[p], p))[:k])


def shard(scores, n_visible, dcp_size):
    """[W, B, T, ceil(S/W)] scores and [W, B, T] lengths of each rank; the filling is invisible."""
    rows = -(-scores.shape[-1] // dcp_size)
    widths = [(0, 0)] * (scores.ndim - 1) + [(0, rows * dcp_size - scores.shape[-1])]
    padded = np.pad(scores, widths, constant_values=NAN)
    local = np.stack([padded[..., r::dcp_size] for r in range(dcp_size)])
    lengths = np.stack(
        [np.maximum((n_visible - r + dcp_size - 1) // dcp_size, 0) for r in range(dcp_size)]
    )
    return jnp.asarray(local, jnp.float32), jnp.asarray(lengths, jnp.int32)


@partial(jax.jit, static_argnames=("k", "capacity", "wide"))
def exchange(local, lengths, n_visible, *, k, capacity, wide=False):
    """Every rank's (index, count, certified), as the ranks compute it from the gathered buffers."""
    sent = jax.vmap(lambda s, n: pack_candidates(local_topk(s, n, capacity), wide=wide))(
        local, lengths
    )
    keys, index = unpack_candidates(sent, wide=wide)
    ranks = jnp.arange(local.shape[0], dtype=jnp.int32)
    merged = jax.vmap(lambda rank: merge_candidates(keys, index, n_visible, rank, k=k))(ranks)
    return index, *merged


def select(scores, n_visible, k, dcp_size, *, capacity=None, wide=False):
    """Selected positions per row (ascending, with duplicates if there were any) and
    certificates per rank.
    """
    scores, n_visible = np.asarray(scores, np.float32), np.asarray(n_visible, np.int32)
    local, lengths = shard(scores, n_visible, dcp_size)
    index, count, certified = exchange(
        local, lengths, jnp.asarray(n_visible), k=k, capacity=capacity or k, wide=wide
    )
    index, count = np.asarray(index), np.asarray(count)
    chosen = np.empty(n_visible.shape, object)
    for row in np.ndindex(n_visible.shape):
        chosen[row] = sorted(
            int(j) * dcp_size + r
            for r in range(dcp_size)
            for j in index[(r, *row)][: count[(r, *row)]]
        )
    return chosen, np.asarray(certified)


def at(n=S, **scores):
    """Scores 0 but at the named positions p<position>."""
    values = np.zeros(n, np.float32)
    for name, value in scores.items():
        values[int(name[1:])] = value
    return values


@dataclass(frozen=True)
class Ties:
    id: str
    scores: np.ndarray
    k: int
    selected: list[int]
    n: int = S


CASES = [
    Ties(
        "score_tie_lower_position_on_the_other_rank", at(6, p3=9, p5=8, p1=1, p0=1), 3, [0, 3, 5], 6
    ),
    Ties(
        "score_tie_higher_position_on_the_other_rank",
        at(6, p3=9, p5=8, p1=1, p4=1),
        3,
        [1, 3, 5],
        6,
    ),
    Ties("equal_scores_k1", np.ones(S), 1, [0]),
    Ties("all_equal", np.full(S, 2.5), 8, list(range(8))),
    Ties("all_zero", np.zeros(S), 3, [0, 1, 2]),
    Ties("all_nan", np.full(S, NAN), 3, [0, 1, 2]),
    Ties("all_minus_inf", np.full(S, -INF), 8, list(range(8)), 9),
    Ties(
        "nan_is_minus_inf",
        np.array([NAN, -INF, NAN, -1e38, -INF, NAN] * 4),
        8,
        [0, 1, 2, 3, 4, 9, 15, 21],
    ),
    Ties("nan_below_everything", np.array([NAN, 1.0, NAN, 2.0] * 6), 3, [3, 7, 11]),
    Ties("minus_zero_is_zero", np.array([-0.0, 0.0, -0.0, 0.0] * 6), 3, [0, 1, 2]),
    Ties(
        "zeros_above_negatives",
        np.array([-1.0, -0.0, -2.0, 0.0] * 6),
        8,
        [1, 3, 5, 7, 9, 11, 13, 15],
    ),
    Ties("plus_inf_first", at(p7=INF, p9=3e38, p20=INF), 3, [7, 9, 20]),
    Ties("denormals_are_ordered", at(p5=1e-45, p6=2e-45, p7=-1e-45), 3, [0, 5, 6]),
    Ties("winners_all_at_multiples_of_eight", at(p0=9, p8=8, p16=7), 3, [0, 8, 16]),
    Ties("more_than_visible", at(p1=1), 8, [0, 1, 2, 3, 4], 5),
    Ties("one_visible", at(p1=1), 8, [0], 1),
    Ties("nothing_visible", at(p1=1), 8, [], 0),
    Ties("visible_minus_inf_above_padding", np.full(S, -INF), 8, [0, 1, 2], 3),
]


@pytest.mark.parametrize("dcp_size", SIZES)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_selected_set_of_ties(case, dcp_size):
    scores = np.full(S, 1e9, np.float32)  # what isn't visible would win
    scores[: len(case.scores)] = case.scores
    chosen, certified = select(scores[None, None], np.full((1, 1), case.n), case.k, dcp_size)
    assert chosen[0, 0] == case.selected == oracle(scores, case.n, case.k)
    assert certified.all()


@pytest.mark.parametrize(
    ("dcp_size", "k", "wide"),
    [
        (1, 5, False),
        (2, 5, False),
        (3, 5, True),
        (3, 12, False),
        (4, 12, True),
        (8, 5, True),
        (8, 12, False),
    ],
)
def test_rounded_scores_of_every_length(dcp_size, k, wide):
    """Lengths 0 .. S, so also W - 1, W, K - 1, K, K + 1 and multiples, with about five ties a
    score.
    """
    rng = np.random.default_rng(dcp_size)
    n_visible = np.tile(np.arange(S + 1), (2, 1))
    scores = rng.integers(-2, 3, (2, S + 1, S)).astype(np.float32)
    chosen, certified = select(scores, n_visible, k, dcp_size, wide=wide)
    for row in np.ndindex(n_visible.shape):
        assert chosen[row] == oracle(scores[row], n_visible[row], k)
    assert certified.all()
    counts = np.asarray(naive_counts(jnp.asarray(scores), jnp.asarray(n_visible), k, dcp_size))
    assert (counts.sum(axis=0) == np.minimum(n_visible, k)).all()
    for r in range(dcp_size):
        assert counts[r].tolist() == [
            [sum(p % dcp_size == r for p in row) for row in rows] for rows in chosen
        ]


@pytest.mark.parametrize("dcp_size", [3, 6])
def test_k_and_w_without_common_alignment(dcp_size):
    scores = np.random.default_rng(0).integers(0, 4, (1, 2, 40)).astype(np.float32)
    chosen, _ = select(scores, np.array([[40, 37]]), 12, dcp_size)
    assert [chosen[0, 0], chosen[0, 1]] == [
        oracle(scores[0, 0], 40, 12),
        oracle(scores[0, 1], 37, 12),
    ]


def test_one_tie_rule_locally_and_globally():
    chosen, _ = select(np.ones((1, 1, 2048)), np.full((1, 1), 2048), 512, 2)
    assert chosen[0, 0] == list(range(512))


@pytest.mark.parametrize("n", [1, 5, 2047, 2048, 2049, 4095, 4096, 4097])
def test_lengths_around_index_topk_2048(n):
    scores = np.random.default_rng(n).integers(0, 50, 4097).astype(np.float32)
    chosen, certified = select(
        scores[None, None], np.full((1, 1), n), 2048, 4, capacity=candidate_capacity(2048, 4)
    )
    assert certified.all()
    assert chosen[0, 0] == oracle(scores, n, 2048)


@pytest.mark.parametrize("winner", [0, 5])
def test_all_winners_on_one_rank_fail_the_certificate_and_full_width_is_right(winner):
    k, dcp_size, n = 2048, 8, 8 * 2100
    scores = np.random.default_rng(0).random(n).astype(np.float32)
    scores[winner::dcp_size] += 10
    n_visible = np.full((1, 1), n)
    capacity = candidate_capacity(k, dcp_size)
    _, certified = select(scores[None, None], n_visible, k, dcp_size, capacity=capacity)
    assert not certified.any()
    chosen, certified = select(scores[None, None], n_visible, k, dcp_size)
    assert certified.all()
    assert chosen[0, 0] == oracle(scores, n, k)
    assert {p % dcp_size for p in chosen[0, 0]} == {winner}


@dataclass(frozen=True)
class Certificate:
    id: str
    scores: list[float]
    k: int
    capacity: int
    certified: bool


CERTIFICATES = [
    Certificate("winners_beyond_what_rank0_sent", [9, 0, 8, 0, 7, 0, 6, 0], 4, 2, False),
    Certificate("last_sent_is_the_cutoff", [9, 8, 7, 6, 0, 0, 0, 0], 3, 2, True),
    Certificate("all_sent_selected", [9, 8, 7, 6, 0, 0, 0, 0], 4, 2, False),
    Certificate("last_sent_below_the_cutoff", [9, 8, 1, 7, 0, 6, 0, 0], 2, 2, True),
    Certificate("tie_at_the_cutoff_taken_later", [1, 1, 1, 1, 1, 1, 1, 1], 3, 2, True),
    Certificate("tie_before_the_cutoff_unsent", [1, 0, 1, 0, 1, 0, 1, 9], 4, 2, False),
    Certificate("fewer_sent_than_k", [1, 1, 1, 1, 1, 1, 1, 1], 6, 2, False),
    Certificate("everything_sent", [1, 2, 3, 4, 5, 6, 7, 8], 8, 4, True),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CERTIFICATES])
def test_certificate_two_ranks(case):
    scores = np.array(case.scores, np.float32)
    chosen, certified = select(
        scores[None, None], np.full((1, 1), 8), case.k, 2, capacity=case.capacity
    )
    assert (certified == case.certified).all()
    if case.certified:
        assert chosen[0, 0] == oracle(scores, 8, case.k)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(2, 3, 2), (2, 6, 4), (3, 6, 2), (3, 6, 3), (8, 9, 2)]),
    scores=st.lists(
        st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.0, 2.0, NAN]), min_size=S, max_size=S
    ),
    heavy=st.integers(0, 7),
)
def test_certified_means_equal_to_the_full_selection(shape, scores, heavy):
    """Rows 0 .. S visible keys at once; `heavy` biases one rank so that certificates do fail."""
    dcp_size, k, capacity = shape
    scores = np.array(scores, np.float32)
    scores[heavy % dcp_size :: dcp_size] += heavy // 2
    n_visible = np.arange(S + 1)[None]
    rows = np.broadcast_to(scores, (1, S + 1, S))
    chosen, certified = select(rows, n_visible, k, dcp_size, capacity=capacity)
    assert (certified == certified[0]).all()
    for n in range(S + 1):
        expected = oracle(scores, n, k)
        owned = np.bincount([p % dcp_size for p in expected], minlength=dcp_size)
        local = np.array([len(range(r, n, dcp_size)) for r in range(dcp_size)])
        if certified[0, 0, n]:
            assert chosen[0, n] == expected
        if ((local <= capacity) | (owned < capacity)).all():
            assert certified[0, 0, n]
        if (owned > capacity).any():
            assert not certified[0, 0, n]


@pytest.mark.parametrize("dcp_size", SIZES)
def test_every_rank_and_20_runs_agree_bit_for_bit(dcp_size):
    """In a shard_map, with scores rounded so that a place is contested by many ties."""
    k, batch = 8, 4
    rng = np.random.default_rng(3)
    scores = rng.integers(0, 3, (batch, 1, 64)).astype(np.float32)
    scores[0] = 0.0
    n_visible = np.array([[64], [63], [9], [64]], np.int32)
    local, lengths = shard(scores, n_visible, dcp_size)
    mesh = Mesh(jax.devices()[:dcp_size], "dcp")
    split, whole = NamedSharding(mesh, P("dcp")), NamedSharding(mesh, P())
    inputs = jax.device_put((local, lengths, n_visible), (split, split, whole))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("dcp"), P("dcp"), P()), out_specs=P("dcp"))
    def step(local, lengths, n_visible):
        mine = pack_candidates(local_topk(local[0], lengths[0], k), wide=False)
        gathered = unpack_candidates(jax.lax.all_gather(mine, "dcp"), wide=False)
        rank = jax.lax.axis_index("dcp")
        merged = merge_candidates(gathered.keys, gathered.index, n_visible, rank, k=k)
        own = unpack_candidates(mine, wide=False)
        return jax.tree.map(lambda x: x[None], (own.index, merged, gathered))

    runs = [jax.tree.map(np.asarray, step(*inputs)) for _ in range(20)]
    first = jax.tree.leaves(runs[0])
    for run in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(first, jax.tree.leaves(run), strict=True))
    index, (count, certified), gathered = runs[0]
    assert certified.all()
    for part in gathered:  # what each rank received
        assert (part == part[0]).all()
    for b in range(batch):
        chosen = [
            int(j) * dcp_size + r for r in range(dcp_size) for j in index[r, b, 0, : count[r, b, 0]]
        ]
        assert sorted(chosen) == oracle(scores[b, 0], int(n_visible[b, 0]), k)


def test_score_keys_order_and_floor():
    ordered = np.array([-INF, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, INF], np.float32)
    keys = np.asarray(score_keys(jnp.asarray(ordered))).astype(np.int64)
    assert (np.diff(keys) > 0).all()
    assert keys.min() >= 1
    same = np.asarray(score_keys(jnp.array([NAN, -NAN, -INF, -0.0, 0.0], jnp.float32)))
    assert same[0] == same[1] == same[2] == keys[0]
    assert same[3] == same[4]


@pytest.mark.parametrize("k", [1, 10, 16])
def test_local_topk_is_sorted_and_padded(k):
    rng = np.random.default_rng(k)
    scores = jnp.asarray(rng.integers(-1, 2, (2, 6, 10)), jnp.float32).at[0, 0].set(jnp.nan)
    lengths = jnp.array([[3, 1, 5, 9, 10, 0], [k, k - 1, min(k + 1, 10), 2, 4, 8]], jnp.int32)
    keys, index = jax.jit(local_topk, static_argnames="k")(scores, lengths, k=k)
    best, expected = naive_topk(scores, lengths, k)
    assert keys.shape == index.shape == (2, 6, k)
    assert keys.dtype == jnp.uint32
    assert index.dtype == jnp.int32
    exists = np.arange(k) < np.minimum(lengths, 10)[..., None]
    assert (np.asarray(keys != 0) == exists).all()
    assert (index == expected).all()
    assert (np.asarray(keys == score_keys(best)) | ~exists).all()


@partial(jax.jit, static_argnames=("k", "chunk", "budget"))
def joined(scores, lengths, *, k, chunk, budget=2**26):
    """Top-k of each chunk of keys, joined from left to right."""
    best = None
    for start in range(0, scores.shape[-1], chunk):
        part = scores[..., start : start + chunk]
        keys, index = local_topk(part, jnp.clip(lengths - start, 0, part.shape[-1]), k)
        found = Candidates(keys, index + start)
        best = found if best is None else join_candidates(best, found, budget=budget)
    return best


def assert_joined_equals_whole(scores, lengths, k, chunk, **options):
    got = joined(scores, lengths, k=k, chunk=chunk, **options)
    keys, index = jax.jit(local_topk, static_argnums=2)(scores, lengths, k)
    exists = np.arange(k) < np.minimum(np.asarray(lengths), scores.shape[-1])[..., None]
    assert (got.keys.dtype, got.index.dtype) == (jnp.uint32, jnp.int32)
    assert got.keys.shape == got.index.shape == (*lengths.shape, k)
    np.testing.assert_array_equal(got.keys, keys)
    np.testing.assert_array_equal(np.where(exists, got.index, 0), index)


@pytest.mark.parametrize("chunk", [1, 5, 8, S])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_join_of_chunks_keeps_the_order_of_ties(case, chunk):
    """Ties across chunks, infinities, NaN, and chunks that nobody sees."""
    scores = np.full(S, 1e9, np.float32)
    scores[: len(case.scores)] = case.scores
    found = joined(jnp.asarray(scores)[None, None], jnp.full((1, 1), case.n), k=case.k, chunk=chunk)
    kept = min(case.k, case.n)
    assert sorted(np.asarray(found.index)[0, 0, :kept].tolist()) == case.selected
    assert (np.asarray(found.keys)[0, 0, kept:] == 0).all()


@pytest.mark.parametrize("k", [1, 5, 12, S, S + 9])
@pytest.mark.parametrize("chunk", [2, 7, 12])
def test_join_of_chunks_is_the_topk_of_all_keys(k, chunk):
    """Every length 0 .. S, about five ties a score; k below, at and above the keys of a chunk."""
    rng = np.random.default_rng(k)
    scores = rng.integers(-2, 3, (2, S + 1, S)).astype(np.float32)
    scores[1, :, 3::5] = -INF
    lengths = jnp.asarray(np.tile(np.arange(S + 1), (2, 1)), jnp.int32)
    assert_joined_equals_whole(jnp.asarray(scores), lengths, k, chunk)


@pytest.mark.parametrize("budget", [1, 1500])
def test_join_is_the_same_in_blocks_of_rows(budget):
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 4, (2, 5, S)), jnp.float32)
    lengths = jnp.asarray(np.resize([S, 7, 0, 13, 1, 23, 8], (2, 5)), jnp.int32)
    assert_joined_equals_whole(scores, lengths, 6, 7, budget=budget)


def test_join_of_lists_of_different_lengths():
    """As many as the first has; padding never goes before a visible -inf."""
    one, inf = np.asarray(score_keys(jnp.array([1.0, -INF]))).tolist()
    first = Candidates(jnp.array([one, inf, 0], jnp.uint32), jnp.array([4, 2, 0], jnp.int32))
    second = Candidates(jnp.array([one, inf], jnp.uint32), jnp.array([11, 10], jnp.int32))
    best = join_candidates(first, second)
    assert best.keys.tolist() == [one, one, inf]
    assert best.index.tolist() == [4, 11, 2]
    nothing = jax.tree.map(jnp.zeros_like, second)
    assert join_candidates(first, nothing).keys.tolist() == first.keys.tolist()


def test_merge_is_the_same_in_blocks_of_rows():
    scores = np.random.default_rng(0).integers(0, 4, (2, 5, 21)).astype(np.float32)
    n_visible = jnp.full((2, 5), 21, jnp.int32)
    local, lengths = shard(scores, np.asarray(n_visible), 3)
    keys, index = jax.vmap(lambda s, n: local_topk(s, n, 6))(local, lengths)
    merge = jax.jit(merge_candidates, static_argnames=("k", "budget"))
    whole = merge(keys, index, n_visible, 1, k=6)
    for budget in (1, 1500):
        blocked = merge(keys, index, n_visible, 1, k=6, budget=budget)
        assert all((a == b).all() for a, b in zip(whole, blocked, strict=True))


@pytest.mark.parametrize(
    ("wide", "ids"),
    [(False, [0, 1, 65535]), (True, [0, 65536, 2**24 + 1, 2**31 - 1])],
    ids=["u16", "u32"],
)
def test_pack_keeps_ids_and_keys(wide, ids):
    keys = jnp.array([0xFFFFFFFF, 0x80000001, 0x00010000, 0], jnp.uint32)[: len(ids)]
    sent = Candidates(keys, jnp.array(ids, jnp.int32))
    buffer = pack_candidates(sent, wide=wide)
    assert buffer.dtype == (jnp.uint32 if wide else jnp.uint16)
    assert buffer.shape == ((2 if wide else 3) * len(ids),)
    received = unpack_candidates(buffer, wide=wide)
    assert (received.keys == sent.keys).all()
    assert received.index.tolist() == ids
    assert received.index.dtype == jnp.int32


def test_positions_beyond_2_to_24_decide_ties():
    """Neighbours that float32 can't tell apart."""
    keys = jnp.full((2, 1, 1, 1), 7, jnp.uint32)
    index = jnp.full((2, 1, 1, 1), 2**23 + 1, jnp.int32)
    n_visible = jnp.full((1, 1), 2**24 + 4, jnp.int32)
    counts = [int(merge_candidates(keys, index, n_visible, r, k=1).count[0, 0]) for r in (0, 1)]
    assert counts == [1, 0]


def test_candidate_capacity():
    assert [candidate_capacity(2048, w) for w in (1, 2, 4, 8)] == [2048, 1206, 669, 376]
    assert candidate_capacity(8, 2) == 8
    for k in (1, 3, 16, 512, 2048):
        sizes = [candidate_capacity(k, w) for w in range(2, 65)]
        assert all(1 <= c <= k for c in sizes)
        assert all(c * w >= k for w, c in zip(range(2, 65), sizes, strict=True))
        assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(ValueError, match="k=0"):
        candidate_capacity(0, 2)
