"""Exact global top-k over the ranks' keys, by one total order.

The order: score descending (NaN counts as -inf, -0.0 as +0.0), then position ascending; what is not
visible sorts below every visible key, a visible -inf included. Each rank sends its best C
candidates, sorted; a rank's selected keys are then always a *prefix* of its own list, so the merge
only has to say how long the prefix is.

Steps of the exchange: `local_topk` -> `pack_candidates` -> all-gather -> `unpack_candidates` ->
`merge_candidates`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt16, UInt32

from pallas_kernels.blocking import BUDGET_BYTES, block_size, map_blocks
from pallas_kernels.dispatch import pick

MAX_NARROW_KEYS = 2**16  # local indices of up to this many keys a rank fit into 16 bits
PADDING_KEY = 0  # below the key of a visible -inf, 0x007FFFFF
_SIGN, _MAGNITUDE, _INF = np.array([0x80000000, 0x7FFFFFFF, 0x7F800000], np.uint32)


class Candidates(NamedTuple):
    """A rank's best keys, sorted in the total order; entries beyond the visible are (0, 0)."""

    keys: UInt32[Array, "*rows C"]
    index: Int32[Array, "*rows C"]


class Merge(NamedTuple):
    """How many of my own sorted candidates are selected, and whether the selection is exact."""

    count: Int32[Array, "*rows"]
    certified: Bool[Array, "*rows"]


def score_keys(scores: Float[Array, "*rows S"]) -> UInt32[Array, "*rows S"]:
    """Unsigned keys in the order of the scores; every score has a key >= 1."""
    # On the bits only: a backend may compare denormals as zeros, which must not change the order.
    bits = lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.uint32)
    bits = jnp.where((bits & _MAGNITUDE) > _INF, _SIGN | _INF, bits)
    bits = jnp.where(bits == _SIGN, 0, bits)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def candidate_capacity(k: int, dcp_size: int) -> int:
    """Candidates per rank in the pruned exchange: k/W plus 8 sigma of an even spread."""
    if k < 1 or dcp_size < 1:
        raise ValueError(f"candidate_capacity needs k={k} >= 1 and dcp_size={dcp_size} >= 1.")
    sigma = math.sqrt(k * (dcp_size - 1)) / dcp_size
    return min(k, math.ceil(k / dcp_size + 8 * sigma))


def local_topk(
    scores: Float[Array, "B T S"],
    lengths: Int32[Array, "B T"],
    k: int,
    *,
    implementation: str | None = None,
) -> Candidates:
    """The best k of the first `lengths` scores of each row, ties to the lowest index."""
    return pick("local_topk", implementation, {"xla": _local_topk_xla})(scores, lengths, k)


def _local_topk_xla(scores, lengths, k):
    n_keys = scores.shape[-1]
    kept = min(k, n_keys)
    with jax.named_scope("local_topk"):
        # On the integer keys top_k is a stable sort on every backend, and padding (0) can't tie
        # with a visible key.
        visible = jnp.arange(n_keys, dtype=jnp.int32) < lengths[..., None]
        keys, index = lax.top_k(jnp.where(visible, score_keys(scores), PADDING_KEY), kept)
        index = jnp.where(keys == PADDING_KEY, 0, index.astype(jnp.int32))
        if kept < k:
            widths = [(0, 0)] * (scores.ndim - 1) + [(0, k - kept)]
            keys, index = jnp.pad(keys, widths), jnp.pad(index, widths)
    return Candidates(keys, index)


def join_candidates(
    first: Candidates, second: Candidates, *, budget: int = BUDGET_BYTES
) -> Candidates:
    """The best of two sorted lists, as many as `first` has.

    Every index of `first` must be lower than those of `second` (two chunks of one rank's keys).
    """
    rows, kept = first.keys.shape[:-1], first.keys.shape[-1]

    def join(*lists):
        keys, index = (jnp.concatenate(lists[i::2], axis=-1) for i in (0, 1))
        # Equal keys stay in the order given, which is that of their index.
        best, place = lax.top_k(keys, kept)
        return Candidates(best, jnp.take_along_axis(index, place, axis=-1))

    with jax.named_scope("join_candidates"):
        flat = tuple(x.reshape(-1, x.shape[-1]) for x in (*first, *second))
        per_row = (kept + second.keys.shape[-1]) * 24  # both lists, and the sort of (key, place)
        block = block_size(flat[0].shape[0], per_row, budget)
        joined = map_blocks(join, flat, axis=0, block=block)
    return Candidates(*(x.reshape(*rows, kept) for x in joined))


def pack_candidates(
    candidates: Candidates, *, wide: bool
) -> UInt16[Array, "*rows N"] | UInt32[Array, "*rows N"]:
    """One buffer for the exchange: u16 [.., 3C], or u32 [.., 2C] when `wide`.

    Wide is for ranks that hold more than 65,536 keys: a u16 holds the index else.
    """
    keys, index = candidates
    if wide:
        return jnp.concatenate([keys, index.astype(jnp.uint32)], axis=-1)
    high, low = keys >> 16, keys & 0xFFFF
    return jnp.concatenate([high, low, index.astype(jnp.uint32)], axis=-1).astype(jnp.uint16)


def unpack_candidates(
    buffer: UInt16[Array, "*rows N"] | UInt32[Array, "*rows N"], *, wide: bool
) -> Candidates:
    """The inverse of `pack_candidates`, for any leading axes."""
    if wide:
        keys, index = jnp.split(buffer, 2, axis=-1)
        return Candidates(keys, index.astype(jnp.int32))
    high, low, index = jnp.split(buffer, 3, axis=-1)
    keys = (high.astype(jnp.uint32) << 16) | low.astype(jnp.uint32)
    return Candidates(keys, index.astype(jnp.int32))


def merge_candidates(
    keys: UInt32[Array, "W B T C"],
    index: Int32[Array, "W B T C"],
    n_visible: Int32[Array, "B T"],
    rank: int | Int32[Array, ""],
    *,
    k: int,
    implementation: str | None = None,
    budget: int = BUDGET_BYTES,
) -> Merge:
    """How many of `rank`'s own candidates are among the global best k, and whether that is certain.

    The cutoff is the k-th pair (key, position) of all candidates in the total order, so mine are
    selected iff they stand at or before it. Certified iff every rank either sent all it sees
    (n_visible_r <= C) or its last candidate stands at or after the cutoff: then nothing unsent can
    be selected. C = k always is.

    Args:
        keys: every rank's candidates, sorted; `index` are local indices, position = index * W +
            owner.
        index: see keys.
        n_visible: visible keys of the whole sequence (global).
        rank: mine.
        k: keys to select; fewer where fewer are visible.
        implementation: see `dispatch`.
        budget: bytes of intermediates at a time.
    """
    return pick("merge_candidates", implementation, {"xla": _merge_candidates_xla})(
        keys, index, n_visible, rank, k=k, budget=budget
    )


def _merge_candidates_xla(keys, index, n_visible, rank, *, k, budget):
    n_ranks, n_sent = keys.shape[0], keys.shape[-1]
    rows = n_visible.shape

    def merge(keys, index, n_visible):  # [n, W, C], [n, W, C], [n]
        owner = jnp.arange(n_ranks, dtype=jnp.int32)[:, None]
        position = index * n_ranks + owner
        cut_key, cut_position = _cutoff(keys, position, k)
        own_keys = lax.dynamic_index_in_dim(keys, rank, axis=1, keepdims=False)
        own_position = lax.dynamic_index_in_dim(position, rank, axis=1, keepdims=False)
        before = (own_keys > cut_key[:, None]) | (
            (own_keys == cut_key[:, None]) & (own_position <= cut_position[:, None])
        )
        count = jnp.sum(before & (own_keys != PADDING_KEY), axis=-1, dtype=jnp.int32)
        last_key, last_position = keys[..., -1], position[..., -1]
        at_or_after = (last_key < cut_key[:, None]) | (
            (last_key == cut_key[:, None]) & (last_position >= cut_position[:, None])
        )
        n_local = jnp.maximum((n_visible[:, None] - owner[:, 0] + n_ranks - 1) // n_ranks, 0)
        return Merge(count, jnp.all((n_local <= n_sent) | at_or_after, axis=-1))

    with jax.named_scope("merge_candidates"):
        flat = (
            *(jnp.moveaxis(x, 0, -2).reshape(-1, n_ranks, n_sent) for x in (keys, index)),
            n_visible.reshape(-1),
        )
        # Per row: position, and operands and results of the sort.
        block = block_size(flat[2].shape[0], n_ranks * n_sent * 24, budget)
        merged = map_blocks(merge, flat, axis=0, block=block)
    return Merge(*(x.reshape(rows) for x in merged))


def _cutoff(keys, position, k):
    """The k-th pair of each row; key 0 if there are fewer, so that all visible are selected."""
    n, total = keys.shape[0], keys.shape[1] * keys.shape[2]
    if k > total:
        return jnp.zeros(n, jnp.uint32), jnp.zeros(n, jnp.int32)
    flat = keys.reshape(n, total), position.reshape(n, total)
    if keys.shape[1] == 1:  # one rank's list is sorted already
        return flat[0][:, k - 1], flat[1][:, k - 1]
    inverted, ordered = lax.sort((~flat[0], flat[1]), num_keys=2, is_stable=False)
    return ~inverted[:, k - 1], ordered[:, k - 1]
