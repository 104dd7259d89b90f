"""The sizes that the engine's steps are compiled for: a short list of named buckets. No jax.

A step runs in the smallest bucket that holds it and that is compiled already, so the largest ones
come first and the others only save time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dcp_jax.dcp.layout import pages_needed
from dcp_jax.policy import PrefillPath

# What a decode step may need of the sampler, each including those before it.
Sampler = Literal["greedy", "drawn", "full"]
SAMPLERS: tuple[Sampler, ...] = ("greedy", "drawn", "full")

# A page table of this many tokens costs next to nothing; longer ones grow by GROWTH.
SHORT_CONTEXT = 2048
GROWTH = 8
# Tokens of the smallest prefill; shorter prompts go together into one step of PACKED tokens.
SMALLEST_CHUNK = 32
PACKED = 512


@dataclass(frozen=True)
class Bucket:
    """Shapes and static choices of one executable.

    Attributes:
        rows: sequences.
        tokens: new tokens of each: 1 for decode.
        pages: entries of a page table.
        path: how attention meets the cache.
        sampler: what it can draw; a prefill draws with everything.
        full_width: sends every candidate: for steps whose pruned ones were not certified.
    """

    rows: int
    tokens: int
    pages: int
    path: PrefillPath
    sampler: Sampler
    full_width: bool = False

    @property
    def name(self) -> str:
        """For logs: `decode-64-greedy-p32`, `gathered-1x8192-p32`."""
        shape = (
            f"decode-{self.rows}-{self.sampler}"
            if self.decode
            else f"{self.path.value}-{self.rows}x{self.tokens}"
        )
        return f"{shape}-p{self.pages}" + ("-full-width" if self.full_width else "")

    @property
    def decode(self) -> bool:
        """One new token per row."""
        return self.tokens == 1

    @property
    def size(self) -> tuple[int, int, int]:
        """Sorts buckets: a step should run in the smallest."""
        return self.rows * self.tokens, self.pages, SAMPLERS.index(self.sampler)

    def holds(self, other: "Bucket") -> bool:
        """Whether a step of the bucket `other` can run in this one."""
        return (
            self.rows >= other.rows
            and self.tokens >= other.tokens
            and self.decode == other.decode
            and self.pages >= other.pages
            and SAMPLERS.index(self.sampler) >= SAMPLERS.index(other.sampler)
            and (self.path, self.full_width) == (other.path, other.full_width)
        )


@dataclass(frozen=True)
class Ladder:
    """Sizes to choose from, each ascending.

    Attributes:
        rows: of decode steps.
        chunks: (rows, tokens) of prefill steps, in order of their tokens.
        pages: of page tables.
        paths: of prefill steps.
        samplers: of decode steps.
        dense_chunks: the `chunks` of `MHA_ONE_SHOT`, which reads short rows only; None: all.
        dense_pages: its page tables, whose every key it reads; None: all.
    """

    rows: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]
    paths: tuple[PrefillPath, ...]
    samplers: tuple[Sampler, ...] = SAMPLERS
    dense_chunks: tuple[tuple[int, int], ...] | None = None
    dense_pages: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        *,
        max_running_requests: int,
        chunked_prefill_size: int,
        max_model_len: int,
        page_size: int,
        dcp_size: int,
        paths: Sequence[PrefillPath],
        dense_tokens: int,
    ) -> "Ladder":
        """The ladder of an engine: three or four sizes of each kind; `dense_tokens` is the longest
        row that `MHA_ONE_SHOT` reads.

        A chunk has at least `dcp_size` tokens, so that its tokens can be spread over the ranks.
        """
        longest = pages_needed(max_model_len, page_size, dcp_size)
        short = min(pages_needed(SHORT_CONTEXT, page_size, dcp_size), longest)
        smallest = max(min(SMALLEST_CHUNK, chunked_prefill_size), dcp_size)
        tokens = _steps(smallest, max(chunked_prefill_size, dcp_size), 4)
        packed = min(PACKED, tokens[-1])
        rows = [max(1, min(packed // size, max_running_requests)) for size in tokens]
        chunks, pages = tuple(zip(rows, tokens, strict=True)), _steps(short, longest, GROWTH)
        table = pages_needed(min(max(dense_tokens, 1), max_model_len), page_size, dcp_size)
        return cls(
            rows=_steps(1, max_running_requests, GROWTH),
            chunks=chunks,
            pages=pages,
            paths=tuple(paths),
            dense_chunks=chunks[: 1 + sum(size < dense_tokens for size in tokens)],
            dense_pages=(*(p for p in pages if p < table), table),
        )

    def __post_init__(self):
        sizes = (self.rows, self.chunks, self.pages, self.paths, self.samplers)
        if not all(sizes) or self.samplers[-1] != SAMPLERS[-1]:
            raise ValueError(
                f"{self} has no bucket for some steps: give at least one size of each kind, and "
                f"the sampler {SAMPLERS[-1]!r}."
            )

    def check(self, *, rows: int, pages: int) -> None:
        """Refuse a ladder without a bucket for the largest steps.

        Raises:
            ValueError: decode steps have more rows, or page tables more entries.
        """
        for name, size, largest in (
            ("rows", rows, self.rows[-1]),
            ("pages", pages, self.pages[-1]),
        ):
            if size > largest:
                raise ValueError(
                    f"the ladder's largest {name} are {largest} and steps may have {size}: give a "
                    "ladder with that many, or lower max_running_requests or max_model_len."
                )

    def decode(
        self, rows: int, pages: int, sampler: Sampler, *, full_width: bool = False
    ) -> Bucket:
        """The bucket of a decode step."""
        enough = self.samplers[-1] if sampler not in self.samplers else sampler
        return Bucket(
            _fit(self.rows, rows, "rows"),
            1,
            _fit(self.pages, pages, "pages"),
            PrefillPath.OWNED,
            enough,
            full_width,
        )

    def prefill(
        self, tokens: int, pages: int, path: PrefillPath, *, full_width: bool = False
    ) -> Bucket:
        """The bucket of chunks of at most `tokens` tokens; its `rows` say how many go together."""
        _, tables = self.shapes(path)
        pages = _fit(tables, pages, "pages")
        return Bucket(*self.chunk(tokens), pages, path, "full", full_width)

    def shapes(self, path: PrefillPath) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """(rows, tokens) and page tables of the prefill steps of one path."""
        if path is not PrefillPath.MHA_ONE_SHOT:
            return self.chunks, self.pages
        return self.dense_chunks or self.chunks, self.dense_pages or self.pages

    def chunk(self, tokens: int) -> tuple[int, int]:
        """(rows, tokens) of the prefill step for chunks of `tokens` tokens."""
        size = _fit(tuple(size for _, size in self.chunks), tokens, "tokens of a chunk")
        return next(chunk for chunk in self.chunks if chunk[1] == size)

    def largest(self) -> list[Bucket]:
        """One bucket per kind of step: with them compiled, every step can run."""
        largest = ((path, *self.shapes(path)) for path in self.paths)
        prefill = [Bucket(*chunks[-1], p[-1], path, "full") for path, chunks, p in largest]
        return [self.decode(self.rows[-1], self.pages[-1], self.samplers[-1]), *prefill]

    def buckets(self) -> list[Bucket]:
        """Every bucket, the largest first."""
        decode = [
            self.decode(r, p, s) for r in self.rows for p in self.pages for s in self.samplers
        ]
        prefill = [
            Bucket(*chunk, p, path, "full")
            for path in self.paths
            for chunks, pages in [self.shapes(path)]
            for chunk in chunks
            for p in pages
        ]
        rest = sorted({*decode, *prefill}, key=lambda bucket: bucket.size, reverse=True)
        return list(dict.fromkeys([*self.largest(), *rest]))


def smallest_holding(wanted: Bucket, compiled: Iterable[Bucket]) -> Bucket | None:
    """The smallest compiled bucket in which a step of `wanted` can run."""
    fits = [bucket for bucket in compiled if bucket.holds(wanted)]
    return min(fits, key=lambda bucket: bucket.size, default=None)


def full_width(bucket: Bucket) -> Bucket:
    """The same sizes, with every candidate sent."""
    return replace(bucket, full_width=True)


def _steps(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """`smallest`, then `factor` times as much each, then `largest`."""
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def _fit(sizes: tuple[int, ...], wanted: int, name: str) -> int:
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"a step of {wanted} {name} is larger than the largest bucket, {sizes[-1]}.")
