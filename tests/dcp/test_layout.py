"""The owner rule: properties that every W must have, in every kind of integer."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_jax.dcp import layout

widths = st.integers(1, 9)
page_sizes = st.sampled_from([1, 2, 4, 16, 64])
places = st.integers(0, 2**40)  # Python ints, beyond int32 on purpose


@given(slot=places, W=widths)
def test_a_slot_is_one_row_of_one_owner(slot: int, W: int):
    owner, row = layout.owner(slot, W), layout.row(slot, W)
    assert 0 <= owner < W
    assert layout.slot(owner, row, W) == slot


@given(owner=st.integers(0, 8), row=places, W=widths)
def test_a_row_of_an_owner_is_one_slot(owner: int, row: int, W: int):
    owner %= W
    slot = layout.slot(owner, row, W)
    assert (layout.owner(slot, W), layout.row(slot, W)) == (owner, row)


@given(none=st.integers(-(2**40), -1), W=widths, page_size=page_sizes)
def test_none_stays_none(none: int, W: int, page_size: int):
    assert layout.owner(none, W) == -1
    assert layout.row(none, W) == -1
    assert layout.local_index(none, W) == -1
    assert layout.page_of(none, page_size, W) == -1
    assert layout.slot(none, 3, W) == layout.slot(0, none, W) == -1
    assert layout.position_of(none, 0, W) == -1
    assert layout.slot_of(none, 5, page_size, W) == layout.slot_of(2, none, page_size, W) == -1
    assert layout.pool_row(none, 5, page_size) == layout.pool_row(2, none, page_size) == -1


@given(page=st.integers(0, 10**6), position=places, page_size=page_sizes, W=widths)
def test_the_owner_of_a_position_depends_on_no_page(page, position, page_size, W):
    slot = layout.slot_of(page, position, page_size, W)
    assert layout.owner(slot, W) == position % W
    assert slot // (page_size * W) == page


@given(page=st.integers(0, 10**6), position=places, page_size=page_sizes, W=widths)
def test_the_global_and_the_local_way_to_a_row_agree(page, position, page_size, W):
    """Globally: position -> slot -> row. On the owner: position -> local index -> row."""
    local = layout.local_index(position, W)
    assert layout.position_of(local, position % W, W) == position
    assert local // page_size == layout.page_of(position, page_size, W)
    slot = layout.slot_of(page, position, page_size, W)
    assert layout.pool_row(page, local, page_size) == layout.row(slot, W)


@given(n=st.integers(0, 10**6), W=widths)
def test_local_lengths_add_up(n: int, W: int):
    lengths = [layout.local_length(n, rank, W) for rank in range(W)]
    assert sum(lengths) == n
    assert max(lengths) == layout.max_local_length(n, W) == -(-n // W)
    assert sorted(lengths, reverse=True) == lengths


@given(n=st.integers(0, 200), W=widths)
def test_local_length_counts_owned_positions(n: int, W: int):
    for rank in range(W):
        owned = [p for p in range(n) if layout.owner(p, W) == rank]
        assert layout.local_length(n, rank, W) == len(owned)
        assert [layout.position_of(j, rank, W) for j in range(len(owned))] == owned


@given(n=st.integers(0, 10**5), page_size=page_sizes, W=widths)
def test_pages_needed_is_the_fewest_that_hold_them(n: int, page_size: int, W: int):
    pages = layout.pages_needed(n, page_size, W)
    assert (pages - 1) * page_size * W < n <= pages * page_size * W or n == pages == 0
    if n:
        assert layout.page_of(n - 1, page_size, W) == pages - 1


@given(size=st.integers(0, 10**6), multiple=st.integers(1, 1000))
def test_padded(size: int, multiple: int):
    assert layout.padded(size, multiple) % multiple == 0
    assert 0 <= layout.padded(size, multiple) - size < multiple


@given(
    slots=st.lists(st.integers(-5, 2**20), min_size=1, max_size=20), W=widths, page_size=page_sizes
)
def test_ints_numpy_and_jax_agree(slots: list[int], W: int, page_size: int):
    calls = [
        lambda x: layout.owner(x, W),
        lambda x: layout.row(x, W),
        lambda x: layout.slot(x % W, x, W),
        lambda x: layout.local_length(x, W - 1, W),
        lambda x: layout.max_local_length(x, W),
        lambda x: layout.position_of(x, 0, W),
        lambda x: layout.slot_of(x % 7, x, page_size, W),
        lambda x: layout.pool_row(x % 7, x, page_size),
        lambda x: layout.page_of(x, page_size, W),
        lambda x: layout.pages_needed(x, page_size, W),
        lambda x: layout.layer_row(x, 1, 100, 3),
    ]
    for call in calls:
        want = [call(s) for s in slots]
        assert all(type(w) is int for w in want)
        for array in (np.array(slots, np.int32), jnp.array(slots, jnp.int32)):
            got = call(array)
            assert got.dtype == np.int32
            assert np.asarray(got).tolist() == want


def test_layer_row_drops_what_is_outside_its_layer():
    rows = np.array([-1, 0, 9, 10, -7], np.int32)
    assert layout.layer_row(rows, 2, 10, 3).tolist() == [30, 20, 29, 30, 30]
    pool = jnp.zeros(30).at[layout.layer_row(jnp.asarray(rows), 2, 10, 3)].set(1.0, mode="drop")
    assert np.flatnonzero(pool).tolist() == [20, 29]


@pytest.mark.parametrize("W", [1, 2, 3, 8])
@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_beyond_one_ranks_capacity_survive(W: int, page_size: int):
    """Fill every slot of the pool, those past one rank's capacity above all, and read them back.

    Using a slot where a row was meant is right until a pool holds more tokens than one rank's
    rows, and overwrites other tokens from there on. A batch with -1 must write nothing anywhere.
    """
    rows_per_rank = 6 * page_size
    n_slots = rows_per_rank * W
    slots = np.random.default_rng(0).permutation(n_slots).astype(np.int32)
    written = np.concatenate([slots, np.full(3, -1, np.int32)])
    values = jnp.asarray(written, jnp.float32)
    pools = []
    for rank in range(W):
        mine = np.where(layout.owner(written, W) == rank, layout.row(written, W), -1)
        rows = layout.layer_row(jnp.asarray(mine), 0, rows_per_rank, 1)
        pools.append(jnp.full(rows_per_rank, -9.0).at[rows].set(values, mode="drop"))
    for slot in range(n_slots):
        assert pools[layout.owner(slot, W)][layout.row(slot, W)] == slot


def test_a_pool_must_be_addressable_by_int32():
    layout.check_pool(0)
    layout.check_pool(layout.MAX_ROWS)
    with pytest.raises(ValueError, match="pool of 2147483648 rows.*int32.*lower max_total_tokens"):
        layout.check_pool(layout.MAX_ROWS + 1)
    # The sentinel of the largest pool is still a positive int32.
    last = np.array([-1], np.int32)
    assert layout.layer_row(last, 0, layout.MAX_ROWS, 1).tolist() == [layout.MAX_ROWS]
