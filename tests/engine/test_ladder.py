"""Buckets: every step has one, the largest hold all, a step runs in the smallest compiled."""

import pytest

from dcp_jax.engine.ladder import Bucket, Ladder, smallest_holding
from dcp_jax.policy import PrefillPath

BOTH = (PrefillPath.GATHERED, PrefillPath.OWNED)
LARGE = {
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "max_model_len": 131072,
    "dense_tokens": 2048,
}


def ladder(page_size=64, dcp_size=8, paths=BOTH, **changes) -> Ladder:
    return Ladder.of(page_size=page_size, dcp_size=dcp_size, paths=paths, **{**LARGE, **changes})


def test_sizes_of_a_large_engine():
    found = ladder()
    assert found.rows == (1, 8, 64)
    assert found.chunks == ((16, 32), (4, 128), (1, 512), (1, 2048), (1, 8192))
    assert found.pages == (4, 32, 256)
    assert len(found.buckets()) == 3 * 3 * 3 + 5 * 3 * 2
    assert [b.name for b in found.largest()] == [
        "decode-64-full-p256",
        "gathered-1x8192-p256",
        "owned-1x8192-p256",
    ]


def test_dense_steps_read_no_more_than_short_rows():
    dense = PrefillPath.MHA_ONE_SHOT
    found = ladder(paths=(dense, *BOTH), dense_tokens=700)
    chunks, pages = found.shapes(dense)
    assert [tokens for _, tokens in chunks] == [32, 128, 512, 2048]
    assert pages == (2,), "700 tokens in pages of 512"
    assert "mha_one_shot-1x2048-p2" in [b.name for b in found.largest()]
    assert found.prefill(40, 2, dense).pages == 2
    assert found.shapes(PrefillPath.OWNED) == (found.chunks, found.pages)


@pytest.mark.parametrize("dcp_size", [1, 3, 8])
def test_a_small_engine_has_few_buckets(dcp_size):
    found = ladder(
        page_size=4,
        dcp_size=dcp_size,
        paths=BOTH[1:],
        max_running_requests=1,
        chunked_prefill_size=2,
        max_model_len=7,
    )
    assert found.rows == (1,)
    assert [tokens for _, tokens in found.chunks] == [max(2, dcp_size)], "at least one per rank"
    assert found.pages == (-(-7 // (4 * dcp_size)),)


def test_the_largest_hold_every_step():
    found = ladder()
    for bucket in found.buckets():
        one = Bucket(1, bucket.tokens, bucket.pages, bucket.path, bucket.sampler)
        assert smallest_holding(one, found.largest()) is not None
        assert smallest_holding(bucket, found.buckets()) == bucket


def test_a_step_runs_in_the_smallest_compiled_bucket():
    found = ladder()
    small, large = found.decode(3, 2, "greedy"), found.decode(60, 200, "full")
    assert (small.name, large.name) == ("decode-8-greedy-p4", "decode-64-full-p256")
    middle = found.decode(3, 9, "drawn")
    assert smallest_holding(small, [large, middle]) == middle
    assert smallest_holding(middle, [large, small]) == large
    assert smallest_holding(large, [small, middle]) is None
    chunk = found.prefill(100, 3, PrefillPath.OWNED)
    assert (chunk.rows, chunk.tokens) == (4, 128)
    assert not large.holds(chunk)
    assert not found.prefill(100, 3, PrefillPath.GATHERED).holds(chunk)
    assert not found.prefill(100, 3, PrefillPath.OWNED, full_width=True).holds(chunk)


def test_what_no_bucket_holds_is_refused():
    found = ladder()
    with pytest.raises(ValueError, match="65 rows is larger than the largest bucket, 64"):
        found.decode(65, 1, "greedy")
    with pytest.raises(ValueError, match="largest pages are 256 and steps may have 257"):
        found.check(rows=64, pages=257)
    found.check(rows=64, pages=256)
    with pytest.raises(ValueError, match="at least one size of each kind"):
        Ladder(rows=(), chunks=((1, 8),), pages=(1,), paths=BOTH)
