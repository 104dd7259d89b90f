"""Pages are free, in the prefix cache or held by one sequence, whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcp_jax.cache.pages import Holding, PagePool

PAGE = 4  # page_size 2 on 2 ranks


def pool_of(pages: int, **options) -> PagePool:
    return PagePool(pages, PAGE // 2, 2, **options)


def run(pool: PagePool, tokens: list[int], salt: str = "") -> Holding:
    """A sequence whose tokens are all computed."""
    holding = pool.open(tokens, salt)
    assert pool.grow(holding, len(tokens))
    pool.publish(holding, len(tokens), lambda start, stop: tokens[start:stop])
    return holding


def test_pages_are_shared_without_copies():
    pool, tokens = pool_of(8), list(range(11))
    first = run(pool, tokens)
    second = pool.open(tokens)
    assert second.pages == first.pages[:2]
    assert pool.grow(second, 11)
    assert second.pages[2] != first.pages[2]
    assert (pool.in_use, pool.available) == (4, 4)
    pool.check([first, second])
    pool.close(first)
    pool.check([second])
    pool.close(second)
    assert (pool.in_use, pool.tree.size) == (0, 2)
    pool.check()


def test_two_that_compute_the_same_at_once():
    """The tree keeps one's pages; what the other adds to them is found all the same."""
    pool, tokens = pool_of(12), list(range(8))
    holdings = [pool.open(tokens) for _ in range(2)]
    for holding in holdings:
        assert pool.grow(holding, 8)
    for holding in holdings:
        pool.publish(holding, 8, lambda start, stop: tokens[start:stop])
    assert pool.tree.size == 2
    longer = [*tokens, 50, 51, 52, 53]
    assert pool.grow(holdings[1], 12)
    pool.publish(holdings[1], 12, lambda start, stop: longer[start:stop])
    pool.check(holdings)
    for holding in holdings:
        pool.close(holding)
    pool.check()
    assert len(pool.open([*longer, 0]).pages) == 3


def test_only_computed_pages_are_shared():
    pool, tokens = pool_of(8), list(range(16))
    holding = pool.open(tokens)
    assert pool.grow(holding, 16)
    for computed, pages in ((3, 0), (4, 1), (7, 1), (15, 3)):
        pool.publish(holding, computed, lambda start, stop: tokens[start:stop])
        assert pool.tree.size == pages
    pool.close(holding)
    assert len(pool.open([*tokens, 0]).pages) == 3


def test_growing_takes_what_nobody_uses():
    pool = pool_of(4)
    pool.close(run(pool, [0] * 8))
    held = run(pool, [1] * 8)
    assert pool.available == 2
    assert pool.allocate(3) is None
    assert pool.tree.size == 4
    other = pool.open([2] * 9)
    assert not pool.grow(other, 9)
    assert other.pages == []
    assert pool.grow(other, 8)
    assert pool.tree.size == 2  # those of `held`
    pool.check([held, other])


def test_nothing_is_shared_when_off_or_between_salts():
    off = pool_of(8, share=False)
    off.close(run(off, [0] * 8))
    assert (off.tree.size, off.open([0] * 9).pages) == (0, [])
    salted = pool_of(8)
    salted.close(run(salted, [0] * 8, salt="a"))
    assert [len(salted.open([0] * 9, salt).pages) for salt in ("", "a", "b")] == [0, 2, 0]


def test_clear_forgets_every_prefix():
    pool = pool_of(4)
    pool.close(run(pool, [0] * 12))
    pool.clear()
    assert (pool.tree.size, pool.allocator.available) == (0, 4)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pool, h: pool.allocator.allocate(1), "some are lost"),
        (lambda pool, h: h.pages.append(h.pages[-1]), "in two places"),
        (lambda pool, h: pool.free(h.pages[-1:]), "in two places"),
        (lambda pool, h: pool.tree.release(h.nodes), "other users"),
        (lambda pool, h: pool.tree.match([0] * 9), "other users"),
        (lambda pool, h: h.nodes.__setitem__(0, h.nodes[1]), "in two places"),
    ],
)
def test_check_finds_what_is_wrong(harm, message):
    pool = pool_of(8)
    holding = run(pool, [0] * 10)
    pool.check([holding])
    harm(pool, holding)
    with pytest.raises(AssertionError, match=message):
        pool.check([holding])


class Sequences(RuleBasedStateMachine):
    """Sequences over two tokens come, grow, compute, share and go."""

    def __init__(self):
        super().__init__()
        self.pool = pool_of(7)
        self.running: list[tuple[Holding, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from("ab"))
    def come(self, tokens, salt):
        holding = self.pool.open(tokens, salt)
        assert len(holding.pages) * PAGE < len(tokens)
        self.running.append((holding, tokens))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), tokens=st.integers(1, 14))
    def grow_and_compute(self, which, tokens):
        holding, known = self.running[which % len(self.running)]
        before, room = list(holding.pages), self.pool.available
        target = min(tokens, len(known))
        grown = self.pool.grow(holding, target)
        assert grown == (self.pool.needed(target) - len(before) <= room)
        assert holding.pages[: len(before)] == before
        if grown:
            self.pool.publish(holding, target, lambda start, stop: known[start:stop])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def go(self, which):
        holding, _ = self.running.pop(which % len(self.running))
        self.pool.close(holding)

    @invariant()
    def all_pages_are_accounted_for(self):
        self.pool.check([holding for holding, _ in self.running])
        pages = {page for holding, _ in self.running for page in holding.pages}
        doubles = {node.page for holding, _ in self.running for node in holding.nodes}
        assert self.pool.in_use == len(pages | doubles)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
