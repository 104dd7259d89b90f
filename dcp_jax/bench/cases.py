"""What is timed: batches by prefix, extend and rows, and the shapes that the runner gives them."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.buckets import page_bucket, row_bucket, token_bucket
from dcp_jax.policy import PrefillBatch

PARTS = ("attention", "layer", "step")


@dataclass(frozen=True, order=True)
class Case:
    """A batch of equal rows.

    Attributes:
        prefix: cached tokens of each row.
        extend: new tokens of each row.
        batch: rows.
    """

    prefix: int
    extend: int
    batch: int = 1

    @property
    def keys(self) -> int:
        """Keys of a row in the end."""
        return self.prefix + self.extend

    @property
    def tokens(self) -> PrefillBatch:
        """The same, as the policy takes it."""
        return PrefillBatch((self.prefix,) * self.batch, (self.extend,) * self.batch)

    def __str__(self) -> str:
        rows = "" if self.batch == 1 else f"{self.batch} x "
        return f"{rows}{self.prefix}+{self.extend}"


@dataclass(frozen=True)
class Shape:
    """A case as the runner pads it: rows, new tokens of each, entries of each row's page table."""

    rows: int
    tokens: int
    pages: int


def grid(
    prefixes: Iterable[int], extends: Iterable[int], batches: Iterable[int] = (1,)
) -> tuple[Case, ...]:
    """All combinations, in order, each once."""
    return tuple(sorted({Case(*sizes) for sizes in itertools.product(prefixes, extends, batches)}))


def shape_of(case: Case, page_size: int, dcp_size: int, pool_pages: int) -> Shape:
    """The bucket of a case: its time is that of the padded program, as in the engine."""
    pages = pages_needed(case.keys, page_size, dcp_size)
    return Shape(
        row_bucket(case.batch),
        token_bucket(case.extend),
        page_bucket(pages, page_size, dcp_size, pool_pages),
    )


def pool_pages(cases: Iterable[Case], page_size: int, dcp_size: int) -> int:
    """Pages that hold every row of the largest case."""
    return max(case.batch * pages_needed(case.keys, page_size, dcp_size) for case in cases)


def whole_numbers(flag: str, values: Iterable[object], least: int) -> tuple[int, ...]:
    """The values of a flag as integers of at least `least`.

    Raises:
        ValueError: one of them is none, or there is no value.
    """
    found = []
    for value in values:
        try:
            number = int(str(value))
        except ValueError:
            number = least - 1
        if number < least:
            raise ValueError(
                f"{flag} {value} is not a number of tokens or rows: give whole numbers of {least} "
                f"or more, such as {flag} {max(least, 1)} {max(least, 1) * 4}."
            )
        found.append(number)
    if not found:
        raise ValueError(f"{flag} has no value: give one or more whole numbers.")
    return tuple(found)
