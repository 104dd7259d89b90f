"""Index arithmetic of decode context parallelism: who owns a token, and in which row.

The contract, with W = the size of the `dcp` mesh axis:

* a *position* counts tokens of one sequence; a *slot* counts places of the whole pool (all W
  ranks together); a *row* counts places of one rank's pool;
* `owner(slot) = slot % W` and `row(slot) = slot // W`, a bijection between slots and
  (owner, row) pairs;
* a page is `page_size` rows on each rank, so `page_size * W` slots, and starts at a multiple of
  W: the owner of a token is `position % W` too, whatever pages its sequence has;
* the j-th token that rank r owns of a sequence (its *local index*) stands at position `j*W + r`;
* a negative slot, row, page or position means "none" and stays -1. (In Python and JAX
  `-1 % 4 == 3` and index -1 is the last row: without this rule padding is written over data.)

Everything is made of operators only: Python ints, numpy arrays and jax arrays (traced ones
included) go in, and the same comes out, in the dtype that came in. This file must not import jax.
"""

from typing import Any

# An int, a numpy array or a jax array of ints. Any, because naming jax's type would import jax.
Index = Any

# Rows are int32, and the length of a pool is itself a row number: the one that drops a write.
MAX_ROWS = 2**31 - 1


def _or_none(value: Index, exists: Index) -> Index:
    """`value` where `exists`, else -1 (by arithmetic: works for bools and for bool arrays)."""
    return (value + 1) * exists - 1


def owner(slot: Index, W: int) -> Index:
    """The rank that stores `slot`; -1 for a slot < 0."""
    return _or_none(slot % W, slot >= 0)


def row(slot: Index, W: int) -> Index:
    """The row of `slot` in its owner's pool; -1 for a slot < 0."""
    return _or_none(slot // W, slot >= 0)


def slot(owner: Index, row: Index, W: int) -> Index:
    """The slot in row `row` of rank `owner`; -1 when either is negative."""
    return _or_none(row * W + owner, (owner >= 0) & (row >= 0))


def local_length(n: Index, rank: Index, W: int) -> Index:
    """How many of the positions 0..n-1 `rank` owns; 0 for n <= rank."""
    return ((n - rank + W - 1) // W) * (n > 0)


def max_local_length(n: Index, W: int) -> Index:
    """The longest `local_length` over the ranks, rank 0's: ceil(n / W)."""
    return local_length(n, 0, W)


def local_index(position: Index, W: int) -> Index:
    """Which of its owner's tokens of the sequence `position` is; -1 for a position < 0."""
    return row(position, W)


def position_of(local_index: Index, rank: Index, W: int) -> Index:
    """The position of the `local_index`-th token that `rank` owns; -1 for an index < 0."""
    return slot(rank, local_index, W)


def page_of(position: Index, page_size: int, W: int) -> Index:
    """Which entry of its sequence's page table holds `position`; -1 for a position < 0."""
    return row(position, page_size * W)


def slot_of(page: Index, position: Index, page_size: int, W: int) -> Index:
    """The slot of `position` when its page is `page`; -1 when either is negative.

    Congruent to `position` mod W for every page, because a page starts at a multiple of W.
    """
    width = page_size * W
    return _or_none(page * width + position % width, (page >= 0) & (position >= 0))


def pool_row(page: Index, local_index: Index, page_size: int) -> Index:
    """The row in the local pool of a local index whose page is `page`; -1 for "none"."""
    exists = (page >= 0) & (local_index >= 0)
    return _or_none(page * page_size + local_index % page_size, exists)


def pages_needed(n_tokens: Index, page_size: int, W: int) -> Index:
    """Pages that hold `n_tokens` tokens of one sequence."""
    return max_local_length(n_tokens, page_size * W)


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def gather_chunks(pages: int, page_size: int, rows: int, W: int, tokens: int) -> tuple[int, int]:
    """How the pages of `rows` sequences, `pages` each, are gathered `tokens` at a time.

    Returns (chunks, pages of one sequence in a chunk): balanced, and their product may exceed
    `pages` by less than `chunks`. All W ranks and all sequences share the `tokens`; a chunk holds
    one page of each sequence at least.
    """
    fitting = min(max(tokens // (page_size * W * rows), 1), pages)
    chunks = -(-pages // fitting)
    return chunks, -(-pages // chunks)


def layer_row(row: Index, layer: Index, rows_per_layer: int, n_layers: int) -> Index:
    """Row of the flat pool of all layers (`[n_layers * rows_per_layer, ...]`) for a layer's row.

    A row outside the layer, -1 above all, becomes the length of the pool: with `mode="drop"` that
    writes nothing, whereas -1 would wrap to the last row.
    """
    dropped = n_layers * rows_per_layer
    inside = (row >= 0) & (row < rows_per_layer)
    return (row + layer * rows_per_layer - dropped) * inside + dropped


def check_pool(rows_total: int) -> None:
    """Raise ValueError when a flat pool of `rows_total` rows cannot be addressed by int32."""
    if not 0 <= rows_total <= MAX_ROWS:
        raise ValueError(
            f"a pool of {rows_total} rows (layers x rows per layer) cannot be addressed: row "
            f"numbers are int32, so at most {MAX_ROWS} rows; lower max_total_tokens, or raise "
            "dcp_size so that each rank stores fewer rows."
        )
