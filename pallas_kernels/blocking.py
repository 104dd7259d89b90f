"""Bounded memory for the XLA implementations: block sizes from static shapes, loops over blocks.

When one block holds everything there is no loop at all, so that a decode step doesn't pay for one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# What the intermediate arrays of one block may take. Large enough for the matmuls of a block to be
# efficient, small beside any pool.
BUDGET_BYTES = 64 * 2**20


def block_size(n: int, bytes_per_item: int, budget: int = BUDGET_BYTES) -> int:
    """Items per block, balanced over the blocks needed: at least 1, at most n."""
    if n <= 1:
        return 1
    fitting = max(1, budget // max(1, bytes_per_item))
    blocks = -(-n // fitting)
    return -(-n // blocks)


def map_blocks(fn: Callable[..., Any], args: tuple, *, axis: int, block: int) -> Any:
    """`fn(*args)`, evaluated block by block along `axis` of every leaf and put together again.

    The last block starts early rather than run over the end, so nothing is padded: rows that two
    blocks hold are computed twice and the later value is dropped.
    """
    n = jax.tree.leaves(args)[0].shape[axis]
    if block >= n:
        return fn(*args)
    count = -(-n // block)
    repeated = count * block - n

    def one(start):
        return fn(
            *jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, block, axis=axis), args)
        )

    stacked = lax.map(one, jnp.minimum(jnp.arange(count) * block, n - block))

    def join(y):
        head = jnp.moveaxis(y[: count - 1] if repeated else y, 0, axis)
        head = head.reshape(*y.shape[1 : axis + 1], -1, *y.shape[axis + 2 :])
        if not repeated:
            return head
        tail = lax.slice_in_dim(y[-1], repeated, block, axis=axis)
        return jnp.concatenate([head, tail], axis=axis)

    return jax.tree.map(join, stacked)
