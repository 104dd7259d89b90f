"""Which pages of the pool are free. Plain Python: no jax."""

from collections.abc import Iterable


class PageAllocator:
    """Hands out page ids 0..pages-1; a page is `page_size` rows on every rank."""

    def __init__(self, pages: int):
        # Popped from the end, so pages are handed out in ascending order at first.
        self._free = list(range(pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """They."""
        return tuple(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(
                f"{count} pages asked for, {len(self._free)} are free: wait for a request to end, "
                "or raise max_total_tokens."
            )
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: a page that is not held (a double free would hand it out twice).
        """
        pages = list(pages)
        strangers = [page for page in pages if page not in self._held]
        if strangers or len(set(pages)) != len(pages):
            raise ValueError(
                f"pages {strangers or pages} are not held: free each page exactly once."
            )
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))
