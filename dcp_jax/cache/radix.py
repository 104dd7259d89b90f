"""The prefix cache: a tree of pages, each found by the tokens before and in it. No jax.

A node is one full page of `page_tokens` tokens; its path from the root is everything before it. The
page of a node holds what any request that begins so would compute, so requests share it and never
write it. Nodes that nobody uses are evicted, least recently used first and leaves before parents.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence


class Node:
    """One page of the tree.

    Attributes:
        page: its page.
        parent: of the tokens before it.
        children: by the tokens of their page.
        users: requests that hold it.
    """

    __slots__ = ("children", "key", "page", "parent", "touched", "users")

    def __init__(self, key: tuple[int, ...], page: int, parent: "Node | None"):
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.users = 0
        self.touched = 0


class RadixCache:
    """Pages by the tokens that lead to them.

    Attributes:
        size: pages in the tree.
        unused: those of them that nobody holds; all can be evicted.
    """

    def __init__(self, page_tokens: int):
        self.page_tokens = page_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything; whoever owned the pages must free them."""
        self._root = Node((), -1, None)
        self.size = 0
        self.unused = 0
        self._clock = itertools.count(1)
        # (touched, number, node): entries that are out of date are skipped when they come up.
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """Nodes of the longest known prefix that leaves at least one token to compute, held now.

        That is at most `floor((len(tokens) - 1) / page_tokens)` pages.
        """
        node, found, size = self._root, [], self.page_tokens
        whole = (len(tokens) - 1) // size * size
        for start in range(0, whole, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            found.append(child)
            node = child
        for node in found:
            self._hold(node)
        return found

    def extend(self, node: Node | None, tokens: Sequence[int], page: int) -> Node | None:
        """Add a page after `node` (None: the root) and hold it; None if the tree has one already.

        Args:
            node: held by the caller.
            tokens: the page's tokens.
            page: its page, the tree's from now on.
        """
        parent, key = node or self._root, tuple(tokens)
        if len(key) != self.page_tokens:
            raise ValueError(f"a page of {len(key)} tokens is not full: {self.page_tokens} are.")
        if key in parent.children:
            return None
        child = parent.children[key] = Node(key, page, parent)
        child.users = 1
        self.size += 1
        return child

    def release(self, nodes: Sequence[Node]) -> None:
        """Give back nodes that `match` and `extend` held."""
        now = next(self._clock)
        for node in reversed(nodes):
            node.users -= 1
            node.touched = now
            if node.users == 0:
                self.unused += 1
                self._offer(node)

    def evict(self) -> int:
        """Take the least recently used page out of the tree; there must be an unused one."""
        while True:
            touched, _, node = heapq.heappop(self._leaves)
            if node.users or node.children or node.touched != touched or node.parent is None:
                continue
            parent, node.parent = node.parent, None
            del parent.children[node.key]
            self.size -= 1
            self.unused -= 1
            self._offer(parent)
            return node.page

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def _hold(self, node: Node) -> None:
        self.unused -= node.users == 0
        node.users += 1

    def _offer(self, node: Node) -> None:
        """Make a node that has become an unused leaf a candidate for eviction."""
        if node.users == 0 and not node.children and node is not self._root:
            heapq.heappush(self._leaves, (node.touched, next(self._clock), node))
