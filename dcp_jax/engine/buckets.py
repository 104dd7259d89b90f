"""Shapes are rounded up to few sizes, because each is a program of its own."""


def bucket(size: int, factor: int, smallest: int = 1) -> int:
    """The smallest of `smallest * factor**i` that holds `size`."""
    fits = smallest
    while fits < size:
        fits *= factor
    return fits
