"""Who has which page of the pool: free, in the prefix cache, or held by one request. No jax."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_jax.cache.allocator import PageAllocator
from dcp_jax.cache.radix import Node, RadixCache
from dcp_jax.dcp.layout import pages_needed


@dataclass
class Holding:
    """Pages of one sequence, in order: first shared ones (the tree's), then its own.

    Attributes:
        pages: all of them; only appended to while the sequence runs.
        nodes: the tree's nodes of the first pages.
        private: its pages enter the tree no more, as another sequence's equal page has.
    """

    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    private: bool = False


class PagePool:
    """The pages of both caches, shared by prefix.

    Attributes:
        pages: how many there are.
        page_tokens: tokens of a page over all ranks.
        tree: the prefix cache; empty if `share` is off.
    """

    def __init__(self, pages: int, page_size: int, dcp_size: int, *, share: bool = True):
        self.pages = pages
        self.page_tokens = page_size * dcp_size
        self.share = share
        self.tree = RadixCache(self.page_tokens)
        self.allocator = PageAllocator(pages)
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

    def open(self, tokens: Sequence[int]) -> Holding:
        """Pages of the longest cached prefix of a sequence, at least one token less than it."""
        nodes = self.tree.match(tokens) if self.share else []
        return Holding([node.page for node in nodes], nodes)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Pages for `tokens` tokens in all; False if there are not enough, and nothing changes."""
        missing = self.needed(tokens) - len(holding.pages)
        if missing <= 0:
            return True
        pages = self.allocate(missing)
        if pages is None:
            return False
        holding.pages.extend(pages)
        return True

    def publishable(self, holding: Holding, computed: int) -> bool:
        """Whether the first `computed` tokens fill a page that is not shared yet."""
        full = (len(holding.nodes) + 1) * self.page_tokens <= computed
        return full and self.share and not holding.private

    def publish(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        """Let others share the full pages among the first `computed` tokens."""
        size = self.page_tokens
        while self.publishable(holding, computed):
            i = len(holding.nodes)
            before = holding.nodes[-1] if i else None
            node = self.tree.extend(before, tokens[i * size : (i + 1) * size], holding.pages[i])
            if node is None:
                holding.private = True
            else:
                holding.nodes.append(node)

    def close(self, holding: Holding) -> None:
        """Give everything back; what was published stays in the tree until it is evicted."""
        self.free(holding.pages[len(holding.nodes) :])
        self.tree.release(holding.nodes)
        holding.pages, holding.nodes = [], []

    def clear(self) -> None:
        """Empty the tree, whose pages hold nothing any more; nobody may hold any of it."""
        self.free([self.tree.evict() for _ in range(self.tree.unused)])

    def check(self, holdings: Sequence[Holding] = (), reserved: int = 0) -> None:
        """Every page is free, in the tree, or held by exactly one sequence.

        Args:
            holdings: of all running sequences.
            reserved: pages allocated for others.

        Raises:
            AssertionError: pages are lost, or in two places.
        """
        own = [page for h in holdings for page in h.pages[len(h.nodes) :]]
        shared = [node.page for node in self.tree.nodes()]
        users = [node for h in holdings for node in h.nodes]
        assert len(set(own + shared)) == len(own) + len(shared), "a page is in two places"
        assert len(own) + len(shared) + reserved + self.allocator.available == self.pages, (
            f"of {self.pages} pages {len(own)} are held, {len(shared)} in the tree, {reserved} "
            f"reserved and {self.allocator.available} free"
        )
        assert len(shared) == self.tree.size
        assert self.tree.unused == sum(node.users == 0 for node in self.tree.nodes())
        for node in self.tree.nodes():
            assert node.users == users.count(node), "a node has other users than it counts"
        for h in holdings:
            assert [node.page for node in h.nodes] == h.pages[: len(h.nodes)]
