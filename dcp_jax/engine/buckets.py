"""Shapes are rounded up to few sizes, because each is a program of its own. No jax.

Few enough to compile, close enough not to waste much; `plan` reckons with the same sizes.
"""

from dcp_jax.dcp.layout import pages_needed

# A short page table costs so little that all contexts below this many tokens share one.
SHORT_CONTEXT = 512


def bucket(size: int, factor: int, smallest: int = 1) -> int:
    """The smallest of `smallest * factor**i` that holds `size`."""
    fits = smallest
    while fits < size:
        fits *= factor
    return fits


def row_bucket(rows: int) -> int:
    """Sequences of a step: 1, 4, 16, 64, ..."""
    return bucket(rows, 4)


def token_bucket(tokens: int, largest: int | None = None) -> int:
    """New tokens of each: 1, 16, 64, 256, 512, ...; a step of the `largest` size is not padded."""
    if tokens == 1:
        return 1
    fits = bucket(tokens, 4, smallest=16) if tokens <= 256 else bucket(tokens, 2)
    return fits if largest is None else max(tokens, min(fits, largest))


def page_bucket(pages: int, page_size: int, dcp_size: int, pool_pages: int) -> int:
    """Entries of a page table: those of a short context, or of it doubled again and again."""
    short = pages_needed(SHORT_CONTEXT, page_size, dcp_size)
    return bucket(pages, 2, min(short, pool_pages))
