"""Which prefill path a batch takes, and what is refused: pure numbers."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from dcp_jax.policy import (
    Parallelism,
    PrefillBatch,
    PrefillPath,
    PrefillPolicy,
    check_forced,
    choose_path,
    ineligible,
)

MHA, GATHERED = PrefillPath.MHA_ONE_SHOT, PrefillPath.GATHERED
SPLIT, OWNED = PrefillPath.GATHERED_SPLIT_INDEXER, PrefillPath.OWNED
LONG = 10**6


@dataclass(frozen=True)
class Case:
    """The path of rows (prefix, extend)."""

    id: str
    rows: tuple[tuple[int, int], ...]
    path: PrefillPath
    policy: dict = field(default_factory=dict)
    dcp_size: int = 8
    heads: int = 64
    index_topk: int = 2048


CASES = [
    # Dense up to min(dense_attn_kv_len_threshold, index_topk) keys.
    Case("one_token", ((0, 1),), MHA),
    Case("dense_below", ((0, 2047),), MHA),
    Case("dense_at", ((0, 2048),), MHA),
    Case("dense_above", ((0, 2049),), GATHERED),
    Case("dense_behind_a_prefix_at", ((2047, 1),), MHA),
    Case("dense_behind_a_prefix_above", ((2048, 1),), OWNED),
    Case("threshold_below", ((0, 998),), MHA, {"dense_attn_kv_len_threshold": 999}),
    Case("threshold_at", ((0, 999),), MHA, {"dense_attn_kv_len_threshold": 999}),
    Case("threshold_above", ((0, 1000),), GATHERED, {"dense_attn_kv_len_threshold": 999}),
    Case("threshold_0_is_never_dense", ((0, 1),), GATHERED, {"dense_attn_kv_len_threshold": 0}),
    Case("topk_at", ((3, 5),), MHA, index_topk=8),
    Case("topk_above", ((0, 9),), GATHERED, index_topk=8),
    Case("high_threshold_is_exact", ((0, 2049),), GATHERED, {"dense_attn_kv_len_threshold": LONG}),
    # The approximation: up to the threshold, whatever index_topk is.
    Case("approximate_at", ((0, 2048),), MHA, {"allow_dense_beyond_topk": True}, index_topk=8),
    Case("approximate_above", ((0, 2049),), GATHERED, {"allow_dense_beyond_topk": True}),
    Case(
        "approximate_raised",
        ((1000, 3000),),
        MHA,
        {"allow_dense_beyond_topk": True, "dense_attn_kv_len_threshold": 4000},
    ),
    # Owned from 3 x 64 cached tokens per new one.
    Case("owned_below", ((3071, 16),), GATHERED),
    Case("owned_at", ((3072, 16),), OWNED),
    Case("owned_above", ((3073, 16),), OWNED),
    Case("owned_by_fewer_heads", ((3071, 16),), OWNED, heads=8),
    Case("ratio_below", ((4095, 32),), GATHERED, {"owned_prefill_ratio": 2}),
    Case("ratio_at", ((4096, 32),), OWNED, {"owned_prefill_ratio": 2}),
    Case("ratio_0_is_owned_without_a_prefix", ((0, 4096),), OWNED, {"owned_prefill_ratio": 0}),
    Case("ratio_infinite", ((LONG, 1),), SPLIT, {"owned_prefill_ratio": float("inf")}),
    # The split indexer from 8192 visible keys per new token, on average.
    Case("split_below", ((0, 16382),), GATHERED),
    Case("split_at", ((0, 16383),), SPLIT),
    Case("split_above", ((0, 16384),), SPLIT),
    Case("split_behind_a_prefix_below", ((7935, 511),), GATHERED),
    Case("split_behind_a_prefix_at", ((7936, 511),), SPLIT),
    Case("split_moved", ((0, 2049),), SPLIT, {"split_indexer_min_kv": 1025}),
    Case("split_moved_below", ((0, 2049),), GATHERED, {"split_indexer_min_kv": 1026}),
    Case("owned_goes_before_split", ((98112, 511),), OWNED),
    # Over a batch: kv_len is the maximum, prefix and extend are sums, keys a mean over new tokens.
    Case("many_short_rows", ((0, 2048),) * 64, MHA),
    Case("one_long_row_among_short", ((0, 1),) * 63 + ((0, 2049),), GATHERED),
    Case("prefixes_add_up_below", ((6143, 16), (0, 16)), GATHERED),
    Case("prefixes_add_up_at", ((6000, 16), (144, 16)), OWNED),
    Case("mean_below", ((0, 1000), (15_382, 1000)), GATHERED),
    Case("mean_at", ((0, 1000), (15_383, 1000)), SPLIT),
    Case("mean_is_weighted_by_new_tokens", ((0, 15_000), (60_000, 100)), GATHERED),
    # One rank has nothing to gather.
    Case("alone_dense_at", ((0, 2048),), MHA, dcp_size=1, heads=8),
    Case("alone_above", ((0, 2049),), OWNED, dcp_size=1, heads=8),
    Case("alone_long", ((0, LONG),), OWNED, dcp_size=1, heads=8),
]


def batch_of(*rows: tuple[int, int]) -> PrefillBatch:
    return PrefillBatch(*(tuple(column) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_choice(case):
    group = Parallelism(case.dcp_size, case.heads, case.index_topk)
    assert choose_path(PrefillPolicy(**case.policy), batch_of(*case.rows), group) is case.path


@pytest.mark.parametrize("seed", range(4))
def test_sums_of_a_batch_count_every_key_of_every_token(seed):
    rng = np.random.default_rng(seed)
    rows = [(int(rng.integers(0, 50)), int(rng.integers(1, 40))) for _ in range(1 + 2 * seed)]
    visible = [p + t + 1 for p, extend in rows for t in range(extend)]
    batch = batch_of(*rows)
    assert batch.mean_keys == pytest.approx(np.mean(visible), rel=1e-12)
    assert batch.kv_len == max(visible)
    assert (batch.prefix_tokens, batch.extend_tokens) == tuple(map(sum, zip(*rows, strict=True)))


def test_sums_of_nothing():
    empty = PrefillBatch((), ())
    assert (empty.kv_len, empty.prefix_tokens, empty.extend_tokens) == (0, 0, 0)
    assert empty.mean_keys == 0


def test_rows_need_both_numbers():
    with pytest.raises(ValueError, match="shorter"):
        assert PrefillBatch((1, 2), (3,)).kv_len


@pytest.mark.parametrize("path", PrefillPath)
@pytest.mark.parametrize("name", [False, True], ids=["member", "name"])
def test_a_forced_path_wins(path, name):
    policy = PrefillPolicy(force=path.value if name else path)
    assert policy.force is path
    assert policy == PrefillPolicy(force=path)
    group = Parallelism(8, 64, 2048)
    for rows in (((0, 9),), ((2000, 1), (0, 48))):
        assert choose_path(policy, batch_of(*rows), group) is path


FORCED = [
    # path, dcp_size, kv_len, allow_dense_beyond_topk -> what the refusal says, or None
    (MHA, 4, 8, False, None),
    (MHA, 4, 9, False, "9 keys are more than index_topk=8"),
    (MHA, 1, 9, False, "9 keys are more than index_topk=8"),
    (MHA, 4, 9, True, None),
    (GATHERED, 1, 8, False, "dcp_size=1"),
    (SPLIT, 1, 8, False, "dcp_size=1"),
    (GATHERED, 2, LONG, False, None),
    (SPLIT, 2, 1, False, None),
    (OWNED, 1, LONG, False, None),
    (OWNED, 8, 1, False, None),
]


@pytest.mark.parametrize(("path", "dcp_size", "kv_len", "allow", "says"), FORCED)
def test_forced_paths_that_are_not_eligible_are_refused(path, dcp_size, kv_len, allow, says):
    policy = PrefillPolicy(force=path, allow_dense_beyond_topk=allow)
    group = Parallelism(dcp_size, 8, 8)
    reason = ineligible(path, policy, kv_len, group)
    if says is None:
        assert reason is None
        check_forced(policy, kv_len, group)
        assert choose_path(policy, batch_of((kv_len - 1, 1)), group) is path
        return
    assert says in reason
    for refused in (
        lambda: check_forced(policy, kv_len, group),
        lambda: choose_path(policy, batch_of((kv_len - 1, 1)), group),
    ):
        with pytest.raises(ValueError, match=rf"^prefill.force='{path.value}': .*{says}.*\.$"):
            refused()


def test_nothing_is_refused_that_is_not_forced():
    check_forced(PrefillPolicy(), LONG, Parallelism(1, 1, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dense_attn_kv_len_threshold", -1),
        ("dense_attn_kv_len_threshold", 2048.0),
        ("dense_attn_kv_len_threshold", True),
        ("dense_attn_kv_len_threshold", None),
        ("allow_dense_beyond_topk", 1),
        ("allow_dense_beyond_topk", "yes"),
        ("split_indexer_min_kv", -8192),
        ("split_indexer_min_kv", "8192"),
        ("owned_prefill_ratio", -0.1),
        ("owned_prefill_ratio", float("nan")),
        ("owned_prefill_ratio", "3"),
        ("owned_prefill_ratio", False),
        ("gather_chunk_tokens", 0),
        ("gather_chunk_tokens", 1.5),
        ("force", "dense"),
        ("force", "OWNED"),
        ("force", 1),
    ],
)
def test_refused_values_name_the_field_and_the_value(field, value):
    with pytest.raises(ValueError, match=f"^{field}=") as refusal:
        PrefillPolicy(**{field: value})
    (sentence,) = str(refusal.value).splitlines()
    assert sentence.startswith(f"{field}={value!r} ")
    assert sentence.endswith(".")


def test_the_refusal_of_an_unknown_path_lists_the_known():
    with pytest.raises(ValueError, match="force='dense'") as refusal:
        PrefillPolicy(force="dense")
    assert all(repr(path.value) in str(refusal.value) for path in PrefillPath)


def test_numbers_of_numpy_are_numbers():
    policy = PrefillPolicy(
        dense_attn_kv_len_threshold=np.int64(7), owned_prefill_ratio=np.float32(0.5)
    )
    assert choose_path(policy, batch_of((0, 7)), Parallelism(2, 2, 8)) is MHA
    assert choose_path(policy, batch_of((8, 8)), Parallelism(2, 2, 8)) is OWNED
