"""The prefix cache: a tree of pages, each found by the tokens before and in it. No jax.

A node is one full page of `page_tokens` tokens; its path from the root is everything before it. The
page of a node holds what any request that begins so would compute, so requests share it and never
write it. Nodes that nobody uses are evicted, least recently used first and leaves before parents.

Keys are the token ids themselves, not hashes of them: two prefixes are taken for one only if they
are equal. Requests with different salts share nothing.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence


class Node:
    """One page of the tree.

    Attributes:
        key: the tokens of its page; in the first page of a salted prefix, the salt before them.
        page: its page.
        parent: of the tokens before it; None once it was evicted.
        children: by their keys.
        users: requests that hold it.
        touched: when it was last given back.
    """

    __slots__ = ("children", "key", "page", "parent", "touched", "users")

    def __init__(self, key: tuple[int | str, ...], page: int, parent: "Node | None"):
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int | str, ...], Node] = {}
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
        self.size = 0
        self.unused = 0
        self._root = Node((), -1, None)
        self._clock = itertools.count(1)
        # (touched, number, node): entries that are out of date are skipped when they come up.
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, tokens: Sequence[int], salt: str = "") -> list[Node]:
        """Nodes of the longest known prefix that leaves at least one token to compute, held now.

        That is at most `floor((len(tokens) - 1) / page_tokens)` pages.
        """
        node, found, size = self._root, [], self.page_tokens
        whole = (len(tokens) - 1) // size * size
        for start in range(0, whole, size):
            child = node.children.get(self._key(node, tokens[start : start + size], salt))
            if child is None:
                break
            found.append(child)
            node = child
        for node in found:
            self._hold(node)
        return found

    def extend(self, node: Node | None, tokens: Sequence[int], page: int, salt: str = "") -> Node:
        """The page of `tokens` after `node` (None: the root), held now.

        If the tree has none it takes `page`; otherwise the node's page is another, with the same
        contents, and `page` stays the caller's.

        Args:
            node: held by the caller.
            tokens: of the page.
            page: where they were computed.
            salt: as for `match`; the same along a path.

        Raises:
            ValueError: the tokens do not fill a page.
        """
        if len(tokens) != self.page_tokens:
            raise ValueError(f"a page of {len(tokens)} tokens is not full: {self.page_tokens} are.")
        parent = node or self._root
        key = self._key(parent, tokens, salt)
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = Node(key, page, parent)
            self.size += 1
            self.unused += 1
        self._hold(child)
        return child

    def release(self, nodes: Sequence[Node]) -> None:
        """Give back nodes of one path, from the root on, that `match` and `extend` held."""
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
            if not _evictable(node, touched):
                continue
            parent, node.parent = node.parent, None
            assert parent is not None  # the root is never offered
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

    def _key(self, parent: Node, tokens: Sequence[int], salt: str) -> tuple[int | str, ...]:
        return (salt, *tokens) if salt and parent is self._root else tuple(tokens)

    def _hold(self, node: Node) -> None:
        self.unused -= node.users == 0
        node.users += 1

    def _offer(self, node: Node) -> None:
        """Make a node that has become an unused leaf a candidate for eviction."""
        if node.users or node.children or node is self._root:
            return
        heapq.heappush(self._leaves, (node.touched, next(self._clock), node))
        # Without eviction nothing takes the entries out that a later use made void.
        if len(self._leaves) > 2 * self.size + 64:
            self._leaves = [entry for entry in self._leaves if _evictable(entry[2], entry[0])]
            heapq.heapify(self._leaves)


def _evictable(node: Node, touched: int) -> bool:
    """Whether a node is an unused leaf of the tree still, and was not used since `touched`."""
    return not (node.users or node.children or node.parent is None) and node.touched == touched
