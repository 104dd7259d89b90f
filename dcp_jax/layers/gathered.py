"""Cached rows of every rank, gathered in chunks of pages and in order of position.

However long a prefix, only one chunk of it exists at a time beside the pool.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dcp_jax.dcp import layout
from dcp_jax.dcp.collectives import axis_size, gather_keys
from dcp_jax.dcp.step import DcpStep
from dcp_jax.mesh import DCP


class Chunks(NamedTuple):
    """The pages of a batch, cut into chunks.

    Attributes:
        page_table: int32 [B, count * pages].
        count: chunks.
        pages: pages of each row in a chunk.
        page_size: rows per page and rank.
    """

    page_table: Int[Array, "B P"]
    count: int
    pages: int
    page_size: int

    @property
    def width(self) -> int:
        """Keys of one row in a chunk, over all ranks."""
        return self.pages * self.page_size * axis_size(DCP)


def chunks_of(step: DcpStep, page_size: int, tokens: int) -> Chunks:
    """Cut the step's page table so that a chunk has about `tokens` keys over all rows."""
    rows, pages = step.page_table.shape
    count, size = layout.gather_chunks(pages, page_size, rows, axis_size(DCP), tokens)
    padding = ((0, 0), (0, count * size - pages))
    return Chunks(jnp.pad(step.page_table, padding, constant_values=-1), count, size, page_size)


def gather_chunk(leaves: Any, base: int, chunks: Chunks, number: Any, kind: str) -> Any:
    """Rows of chunk `number` of each array in `leaves`, flat: [B * width, ...].

    Args:
        leaves: pytree of pools [M, ...].
        base: first row of the layer's region.
        chunks: the chunks.
        number: which of them (an int, or traced).
        kind: of exchange, "latent" or "index_k".
    """
    table = jax.lax.dynamic_slice_in_dim(
        chunks.page_table, number * chunks.pages, chunks.pages, axis=1
    )
    rows = base + pool_rows_in_order(table, chunks.page_size)

    def gather(pool):
        keys = gather_keys(pool[rows], kind)
        return keys.reshape(-1, *keys.shape[2:])

    return jax.tree.map(gather, leaves)


def fold_chunks(chunks: Chunks, part: Callable[[Any], Any], join: Callable[[Any, Any], Any]) -> Any:
    """`join` of `part(0)`, `part(1)`, ... from left to right."""
    first = part(0)
    if chunks.count == 1:
        return first
    numbers = jnp.arange(1, chunks.count, dtype=jnp.int32)
    return jax.lax.scan(lambda all_, number: (join(all_, part(number)), None), first, numbers)[0]


def pool_rows_in_order(page_table: Int[Array, "B P"], page_size: int) -> Int[Array, "B S"]:
    """Pool rows of a row's local keys 0, 1, 2, ...; no page reads page 0 (never selected)."""
    offsets = jnp.arange(page_size, dtype=jnp.int32)
    rows = jnp.maximum(page_table, 0)[..., None] * page_size + offsets
    return rows.reshape(page_table.shape[0], -1)
