"""Which keys each query attends to, as a mask over all keys: the same set as the engine's top-k.

The engine sorts; over whole training sequences a sort would cost more than the model. Here the
K-th largest key of each row is found digit by digit, two bits at a time (16 passes over the
scores), and equal scores at the K-th place go to the lowest positions, as in `pallas_kernels.topk`.
"""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dcp_jax.layers.linear import einsum32
from pallas_kernels.topk import PADDING_KEY, score_keys

_BLOCK = 128  # keys of a block, within which ties are counted by one matrix product
_CHUNK = 2**25  # scores held at a time, per index head


def index_scores(
    q: Float[Array, "B T H D"], weights: Float[Array, "B T H"], keys: Float[Array, "B S D"]
) -> Float[Array, "B T S"]:
    """float32 scores: sum over heads of weight * relu(q . k)."""
    products = jax.nn.relu(einsum32("bthd,bsd->bhts", q, keys))
    return jnp.einsum("bhts,bth->bts", products, weights)


def kth_key(keys: UInt32[Array, "*R S"], k: int) -> UInt32[Array, "*R"]:
    """The k-th largest key of each row."""

    def digit(i, found):
        shift = (30 - 2 * i).astype(jnp.uint32)
        trials = [found | (jnp.uint32(d) << shift) for d in (1, 2, 3)]
        counts = [jnp.sum(keys >= t[..., None], axis=-1, dtype=jnp.int32) for t in trials]
        best = sum((count >= k).astype(jnp.uint32) for count in counts)
        return found | (best << shift)

    return jax.lax.fori_loop(0, 16, digit, jnp.zeros(keys.shape[:-1], jnp.uint32))


def score_of_key(key: UInt32[Array, "*R"]) -> Float[Array, "*R"]:
    """The inverse of `score_keys`."""
    sign = jnp.uint32(0x80000000)
    return jax.lax.bitcast_convert_type(jnp.where(key >= sign, key ^ sign, ~key), jnp.float32)


def topk_mask(
    scores: Float[Array, "*R S"], visible: Bool[Array, "*R S"], k: int
) -> Bool[Array, "*R S"]:
    """The k best visible keys of each row (all, if they are fewer), ties to the lowest position."""
    keys = jnp.where(visible, score_keys(scores), PADDING_KEY)
    cut = kth_key(keys, k)[..., None]
    above = keys > cut
    places = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return visible & (above | _first(keys == cut, places))


def _first(ties: Bool[Array, "*R S"], count: Int[Array, "*R 1"]) -> Bool[Array, "*R S"]:
    """The first `count` True entries of each row."""
    size = ties.shape[-1]
    blocks = -(-size // _BLOCK)
    widths = [(0, 0)] * (ties.ndim - 1) + [(0, blocks * _BLOCK - size)]
    split = jnp.pad(ties, widths).reshape(*ties.shape[:-1], blocks, _BLOCK)
    # Sums of at most 128 ones are exact in bfloat16's products with float32 sums.
    ones = jnp.triu(jnp.ones((_BLOCK, _BLOCK), jnp.bfloat16))
    within = einsum32("...s,st->...t", split.astype(jnp.bfloat16), ones).astype(jnp.int32)
    total = within[..., -1]
    before = jnp.cumsum(total, axis=-1) - total
    rank = (within + before[..., None]).reshape(*ties.shape[:-1], -1)[..., :size]
    return ties & (rank <= count)


def selection_mask(
    q: Float[Array, "B T H D"],
    weights: Float[Array, "B T H"],
    keys: Float[Array, "B T D"],
    k: int,
    seed: Array | None = None,
) -> Bool[Array, "B T T"]:
    """The selection of every query of whole sequences, causal; no derivative.

    With `seed` the selection is a random one of the same size: the control of the evaluation.
    """
    batch, length = q.shape[:2]
    q, weights, keys = jax.lax.stop_gradient((q, weights, keys))
    parts = []
    for start, stop in segments(length):
        chunk = largest_divisor(stop - start, max(1, _CHUNK // (batch * stop)))

        def select(first, stop=stop, chunk=chunk):
            rows = first + jnp.arange(chunk)
            visible = jnp.arange(stop) <= rows[:, None]
            if seed is None:
                take = [jax.lax.dynamic_slice_in_dim(x, first, chunk, 1) for x in (q, weights)]
                scores = index_scores(*take, keys[:, :stop])
            else:
                shape = batch, chunk, stop
                scores = jax.random.uniform(jax.random.fold_in(seed, first), shape)
            return topk_mask(scores, jnp.broadcast_to(visible, scores.shape), k)

        chosen = jax.lax.map(select, jnp.arange(start, stop, chunk))
        chosen = jnp.moveaxis(chosen, 0, 1).reshape(batch, stop - start, stop)
        parts.append(jnp.pad(chosen, ((0, 0), (0, 0), (0, length - stop))))
    return jnp.concatenate(parts, axis=1)


def segments(length: int) -> list[tuple[int, int]]:
    """Ranges of query rows: each sees the keys up to its end only, so that less is computed."""
    count = 4 if length >= 4096 else 1
    bounds = [length * i // count for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)
