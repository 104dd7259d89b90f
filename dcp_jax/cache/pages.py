"""Who has which page of the pool: free, in the prefix cache, or held by one request. No jax."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dcp_jax.cache.allocator import PageAllocator
from dcp_jax.cache.radix import Node, RadixCache
from dcp_jax.dcp.layout import pages_needed


@dataclass
class Holding:
    """Pages of one sequence, in order.

    Attributes:
        pages: all of them; only appended to while the sequence runs.
        nodes: the tree's nodes of its first pages. A node has the sequence's own page or, where
            another sequence computed the same tokens first, that one's.
        salt: sequences with different salts share nothing.
    """

    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    salt: str = ""

    @property
    def own(self) -> list[int]:
        """Pages that are not the tree's: the last ones, and doubles of the tree's."""
        shared = len(self.nodes)
        doubles = [p for p, node in zip(self.pages, self.nodes, strict=False) if node.page != p]
        return doubles + self.pages[shared:]


class PagePool:
    """The pages of both caches, shared by prefix.

    Attributes:
        pages: how many there are.
        page_tokens: tokens of a page over all ranks.
        tree: the prefix cache; empty if `share` is off.
        returned: how often pages were given back; `available` grows at no other time.
    """

    def __init__(self, pages: int, page_size: int, dcp_size: int, *, share: bool = True):
        self.pages = pages
        self.page_tokens = page_size * dcp_size
        self.share = share
        self.tree = RadixCache(self.page_tokens)
        self.allocator = PageAllocator(pages)
        self.returned = 0
        self._sizes = page_size, dcp_size

    @property
    def available(self) -> int:
        """Pages that can be had now, by eviction too."""
        return self.allocator.available + self.tree.unused

    @property
    def in_use(self) -> int:
        """Pages that running requests hold, shared ones counted once."""
        return self.pages - self.available

    def needed(self, tokens: int) -> int:
        """Pages of a sequence of `tokens` tokens."""
        return pages_needed(tokens, *self._sizes)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, evicting from the tree if need be; None if there are not as many."""
        if count > self.available:
            return None
        missing = count - self.allocator.available
        self.allocator.free([self.tree.evict() for _ in range(missing)])
        return self.allocator.allocate(count)

    def free(self, pages: Sequence[int]) -> None:
        """Give back pages that `allocate` gave."""
        self.allocator.free(pages)
        self.returned += 1

    def open(self, tokens: Sequence[int], salt: str = "") -> Holding:
        """Pages of the longest cached prefix of a sequence, at least one token less than it."""
        nodes = self.tree.match(tokens, salt) if self.share else []
        return Holding([node.page for node in nodes], nodes, salt)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Pages for `tokens` tokens in all; False if there are not enough, and nothing changes."""
        if tokens <= len(holding.pages) * self.page_tokens:
            return True
        pages = self.allocate(self.needed(tokens) - len(holding.pages))
        if pages is None:
            return False
        holding.pages.extend(pages)
        return True

    def publish(
        self, holding: Holding, computed: int, tokens: Callable[[int, int], Sequence[int]]
    ) -> None:
        """Let others share the full pages among the first tokens.

        Args:
            holding: of the sequence.
            computed: tokens whose cache rows are known to be written.
            tokens: gives those at start..stop-1 of the sequence.
        """
        nodes, size = holding.nodes, self.page_tokens
        start, stop = len(nodes) * size, computed // size * size
        if start >= stop or not self.share:
            return
        new = tokens(start, stop)
        for at in range(0, stop - start, size):
            before, page = nodes[-1] if nodes else None, holding.pages[len(nodes)]
            nodes.append(self.tree.extend(before, new[at : at + size], page, holding.salt))

    def close(self, holding: Holding) -> None:
        """Give everything back; what was published stays in the tree until it is evicted."""
        self.free(holding.own)
        self.tree.release(holding.nodes)
        holding.pages, holding.nodes = [], []

    def clear(self) -> None:
        """Empty the tree, whose pages hold nothing any more; nobody may hold any of it."""
        self.free([self.tree.evict() for _ in range(self.tree.unused)])

    def check(self, holdings: Sequence[Holding] = (), reserved: Sequence[int] = ()) -> None:
        """Every page is free, in the tree, or held by exactly one sequence.

        Args:
            holdings: of all running sequences.
            reserved: pages allocated for others.

        Raises:
            AssertionError: pages are lost or in two places, or a count is wrong.
        """
        nodes = list(self.tree.nodes())
        own = [page for h in holdings for page in h.own]
        shared = [node.page for node in nodes]
        free = self.allocator.free_pages
        assert sorted([*own, *shared, *reserved, *free]) == list(range(self.pages)), (
            f"of {self.pages} pages {len(own)} are held, {len(shared)} in the tree, "
            f"{len(reserved)} reserved and {len(free)} free: some are lost or in two places"
        )
        assert len(nodes) == self.tree.size
        assert sum(node.users == 0 for node in nodes) == self.tree.unused
        users = Counter(id(node) for h in holdings for node in h.nodes)
        assert users.keys() <= {id(node) for node in nodes}, "an evicted node is held"
        for node in nodes:
            assert node.users == users[id(node)], "a node has other users than it counts"
        for h in holdings:
            path = all(after.parent is before for before, after in pairwise(h.nodes))
            assert path, "nodes are no path of the tree"
