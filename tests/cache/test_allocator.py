"""The page allocator: every page is free or held by one, whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_jax.cache.allocator import PageAllocator


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_pages_are_held_once_and_come_back(pages, actions):
    allocator, held = PageAllocator(pages), []
    for allocate, count in actions:
        if allocate and count <= allocator.available:
            held.append(allocator.allocate(count))
        elif held:
            allocator.free(held.pop(count % len(held)))
        taken = [page for part in held for page in part]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(pages))
        assert allocator.available == pages - len(taken)


def test_what_is_refused():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    with pytest.raises(ValueError, match="2 pages asked for, 1 are free"):
        allocator.allocate(2)
    allocator.free(pages)
    for wrong in (pages, [7], [0, 0]):
        with pytest.raises(ValueError, match="not held"):
            allocator.free(wrong)
    assert allocator.available == 3
