"""Exact float32 twins of every op, written for reading: no blocking, nothing shared with the ops.

They are the only truth for tests: arguments and results as in the op of the same name.
"""

import jax
import jax.numpy as jnp

_HIGHEST = jax.lax.Precision.HIGHEST


def as_float32(x, scale=None):
    """Any cache array as float32: bytes are e4m3, and a scale holds for 128 values."""
    if x.dtype == jnp.uint8:
        x = jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
    x = x.astype(jnp.float32)
    if scale is None:
        return x
    return x * jnp.repeat(scale, 128, axis=-1)[..., : x.shape[-1]]


def dequantize_blocks(weight, scale, blocks, kind="e4m3"):
    """Each value times the scale of its block, one axis after another."""
    if kind == "mxfp4":
        halves = jnp.stack([weight % 16, weight // 16], axis=-1).reshape(*weight.shape[:-1], -1)
        exponent, mantissa = halves // 2 % 4, halves % 2
        size = jnp.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
        values = jnp.where(halves < 8, size, -size)
        scale = 2.0 ** (scale.astype(jnp.float32) - 127)
    else:
        values = as_float32(weight)
    index = jnp.ix_(
        *(jnp.arange(n) // block for n, block in zip(values.shape, blocks, strict=True))
    )
    return values * scale[index]


def block_gemm(x, weight, scale, *, block, kind="e4m3"):
    """x @ w.T of the dequantised weight; dynamic activations are dequantised before the call."""
    w = dequantize_blocks(weight, scale, block, kind)
    return jnp.matmul(x.astype(jnp.float32), w.T, precision=_HIGHEST)


def index_scores(q, weights, k_pool, k_scale, page_table, lengths, *, page_size, base_row=0):
    """-inf beyond lengths, else k_scale * sum_h weights * relu(q . k)."""
    batch, n_pages = page_table.shape
    rows = base_row + jnp.maximum(page_table, 0)[..., None] * page_size + jnp.arange(page_size)
    rows = rows.reshape(batch, n_pages * page_size)
    keys = as_float32(k_pool)[rows]
    per_head = jnp.einsum("bthd,bsd->bths", as_float32(q), keys, precision=_HIGHEST)
    scores = jnp.sum(weights[..., None] * jnp.maximum(per_head, 0), axis=2)
    if k_scale is not None:
        scores = scores * k_scale[rows][:, None]
    return jnp.where(jnp.arange(rows.shape[1]) < lengths[..., None], scores, -jnp.inf)


def total_order(scores, visible):
    """Indices of each row, best first: visible ones by score, then by index; the invisible last."""
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores) + 0.0  # -0.0 + 0.0 is +0.0
    position = jnp.broadcast_to(jnp.arange(scores.shape[-1]), scores.shape)
    return jnp.lexsort((position, -scores, ~visible), axis=-1)


def local_topk(scores, lengths, k):
    """(scores, index) of the best k visible, best first; where there are fewer (NaN, 0)."""
    n_keys = scores.shape[-1]
    visible = jnp.arange(n_keys) < lengths[..., None]
    index = total_order(scores, visible)[..., :k]
    index = jnp.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, k - index.shape[-1])])
    exists = jnp.arange(k) < jnp.minimum(lengths, n_keys)[..., None]
    best = jnp.take_along_axis(scores, index, axis=-1)
    return jnp.where(exists, best, jnp.nan), jnp.where(exists, index, 0)


def selected_positions(scores, n_visible, k):
    """Mask of the best k of the first n_visible scores in position order: what DCP must select."""
    n_keys = scores.shape[-1]
    order = total_order(scores, jnp.arange(n_keys) < n_visible[..., None])
    place = jnp.argsort(order, axis=-1)
    return place < jnp.minimum(k, n_visible)[..., None]


def merge_counts(scores, n_visible, k, dcp_size):
    """[W, ...] selected keys per rank, of the global scores in position order."""
    mask = selected_positions(scores, n_visible, k)
    return jnp.stack([mask[..., rank::dcp_size].sum(axis=-1) for rank in range(dcp_size)])


def sparse_mla(q_latent, q_pe, pool, rows, counts, *, scale, base_row=0):
    """(out, lse) of the softmax over the first counts rows; (0, -inf) for none."""
    exists = jnp.arange(rows.shape[-1]) < counts[..., None]
    rows = jnp.where(exists, rows + base_row, 0)
    latent, k_pe = as_float32(pool.latent, pool.scale)[rows], as_float32(pool.k_pe)[rows]
    latent = jnp.where(exists[..., None], latent, 0)
    scores = jnp.einsum("bthc,btkc->bthk", as_float32(q_latent), latent, precision=_HIGHEST)
    scores += jnp.einsum("bthr,btkr->bthk", as_float32(q_pe), k_pe, precision=_HIGHEST)
    scores = jnp.where(exists[:, :, None], scores * scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(lse[..., None] == -jnp.inf, 0, jax.nn.softmax(scores, axis=-1))
    return jnp.einsum("bthk,btkc->bthc", weights, latent, precision=_HIGHEST), lse


def merge_partials(outs, lses):
    """Softmax-weighted mean over the leading axis; a partial with an infinite lse isn't there."""
    outs, lses = outs.astype(jnp.float32), lses.astype(jnp.float32)
    lses = jnp.where(jnp.isinf(lses), -jnp.inf, lses)
    lse = jax.nn.logsumexp(lses, axis=0)
    terms = jax.nn.softmax(lses, axis=0)[..., None] * outs
    return jnp.sum(jnp.where(lses[..., None] == -jnp.inf, 0, terms), axis=0), lse
