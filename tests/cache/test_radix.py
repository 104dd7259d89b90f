"""The prefix cache: what it finds, what it gives up first, and that prefixes never mix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_jax.cache.radix import RadixCache

PAGE = 3


def insert(tree: RadixCache, tokens: list[int], pages: list[int], salt: str = "") -> None:
    """Add a sequence's full pages; nobody holds them afterwards."""
    path = []
    for i, page in enumerate(pages):
        key = tokens[i * PAGE : (i + 1) * PAGE]
        path.append(tree.extend(path[-1] if path else None, key, page, salt))
    tree.release(path)


def found(tree: RadixCache, tokens: list[int], salt: str = "") -> list[int]:
    nodes = tree.match(tokens, salt)
    tree.release(nodes)
    return [node.page for node in nodes]


@pytest.mark.parametrize(
    ("length", "pages"), [(1, 0), (3, 0), (4, 1), (6, 1), (7, 2), (9, 2), (10, 3), (99, 3)]
)
def test_a_match_is_whole_pages_and_leaves_a_token(length, pages):
    tree = RadixCache(PAGE)
    insert(tree, list(range(9)), [4, 5, 6])
    assert found(tree, list(range(length))) == [4, 5, 6][:pages]


def test_prefixes_branch_at_pages():
    tree = RadixCache(PAGE)
    insert(tree, [1, 2, 3, 4, 5, 6], [0, 1])
    insert(tree, [1, 2, 3, 4, 5, 7], [9, 2])
    # The second sequence's first page is the tree's already: its own is not taken.
    assert tree.size == 3
    assert found(tree, [1, 2, 3, 4, 5, 6, 0]) == [0, 1]
    assert found(tree, [1, 2, 3, 4, 5, 7, 0]) == [0, 2]
    assert found(tree, [1, 2, 3, 4, 5, 8, 0]) == [0]
    assert found(tree, [4, 5, 6, 0]) == []  # a page is found after its prefix only


def test_salts_share_nothing():
    tree = RadixCache(PAGE)
    insert(tree, [1, 2, 3, 4, 5, 6], [0, 1])
    insert(tree, [1, 2, 3, 4, 5, 6], [2, 3], salt="a")
    for salt, pages in (("", [0, 1]), ("a", [2, 3]), ("b", [])):
        assert found(tree, [1, 2, 3, 4, 5, 6, 7], salt) == pages


def test_least_recently_used_leaves_go_first():
    tree = RadixCache(PAGE)
    insert(tree, [0, 0, 0, 1, 1, 1], [0, 1])
    insert(tree, [0, 0, 0, 2, 2, 2], [9, 2])
    insert(tree, [5, 5, 5], [3])
    found(tree, [0, 0, 0, 1, 1, 1, 0])  # used last
    assert [tree.evict() for _ in range(4)] == [2, 3, 1, 0]
    assert (tree.size, tree.unused) == (0, 0)


def test_what_is_held_stays():
    tree = RadixCache(PAGE)
    insert(tree, [0, 0, 0, 1, 1, 1], [0, 1])
    insert(tree, [5, 5, 5], [3])
    held = tree.match([0, 0, 0, 8])
    assert (tree.size, tree.unused) == (3, 2)
    assert [tree.evict() for _ in range(2)] == [1, 3]
    assert tree.unused == 0
    again = tree.match([0, 0, 0, 9])
    tree.release(held)
    assert tree.unused == 0
    tree.release(again)
    assert tree.evict() == 0


def test_use_without_eviction_leaves_nothing_behind():
    """The queue of candidates does not grow with the number of requests."""
    tree = RadixCache(PAGE)
    for i in range(20):
        insert(tree, [i] * PAGE, [i])
    for i in range(5000):
        found(tree, [i % 20] * (PAGE + 1))
    assert len(tree._leaves) < 200
    assert sorted(tree.evict() for _ in range(20)) == list(range(20))


def test_a_page_that_is_not_full_is_refused():
    with pytest.raises(ValueError, match="a page of 2 tokens is not full: 3 are"):
        RadixCache(PAGE).extend(None, [1, 2], 0)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=25))
def test_a_found_page_has_the_same_prefix(sequences):
    """Against a dictionary from whole prefixes to pages."""
    tree, known, pages = RadixCache(PAGE), {}, iter(range(10**6))
    for tokens in sequences:
        whole = [tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]
        usable = [prefix for prefix in whole if len(prefix) < len(tokens)]
        assert found(tree, tokens) == [known[p] for p in usable if p in known]
        new = [next(pages) for _ in whole]
        insert(tree, tokens, new)
        for prefix, page in zip(whole, new, strict=True):
            known.setdefault(prefix, page)
    assert tree.size == tree.unused == len(known)


def test_1000_random_prefixes_never_mix():
    """Few tokens, so that pages of different prefixes are equal all the time."""
    rng, tree, owner = np.random.default_rng(0), RadixCache(PAGE), {}
    for page in range(0, 10_000, 10):
        tokens = rng.integers(0, 3, rng.integers(1, 28)).tolist()
        nodes = tree.match(tokens)
        for i, node in enumerate(nodes):
            assert owner[node.page] == tokens[: (i + 1) * PAGE]
        tree.release(nodes)
        full = len(tokens) // PAGE
        insert(tree, tokens, list(range(page, page + full)))
        for i in range(full):
            owner.setdefault(page + i, tokens[: (i + 1) * PAGE])
        while tree.size > 60:
            del owner[tree.evict()]
