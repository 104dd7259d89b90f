"""Attention over whole sequences: causal, or over a selection; and single rows of it.

Keys and values are up-projected from the latent (the un-absorbed form), which is cheaper than the
engine's absorbed form when every token attends: the same function up to rounding.
"""

import logging
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tiny_training.selection import largest_divisor, segments

logger = logging.getLogger(__name__)
Implementation = Literal["xla", "cudnn"]

_CHUNK = 2**27  # attention scores held at a time, over all heads


def attend(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T H D"],
    v: Float[Array, "B T H V"],
    mask: Bool[Array, "B T T"] | None,
    *,
    scale: float,
    implementation: Implementation,
) -> Float[Array, "B T H V"]:
    """Softmax attention of every query over the keys up to it, or over those of `mask`."""
    if implementation == "cudnn":
        return _attend_cudnn(q, k, v, mask, scale)
    batch, length, heads, _ = q.shape
    parts = []
    for start, stop in segments(length):
        chunk = largest_divisor(stop - start, max(1, _CHUNK // (batch * heads * stop)))
        keys, values = k[:, :stop], v[:, :stop]

        # The scores are computed again in the backward pass: kept, they would fill the memory.
        @jax.checkpoint
        def rows(first, q, keys, values, mask, stop=stop, chunk=chunk):
            queries = jax.lax.dynamic_slice_in_dim(q, first, chunk, 1)
            if mask is None:
                visible = (jnp.arange(stop) <= (first + jnp.arange(chunk))[:, None])[None]
            else:
                visible = jax.lax.dynamic_slice_in_dim(mask, first, chunk, 1)[:, :, :stop]
            probabilities = _softmax(queries, keys, visible, scale).astype(values.dtype)
            return jnp.einsum("bhts,bshv->bthv", probabilities, values)

        out = jax.lax.map(
            partial(rows, q=q, keys=keys, values=values, mask=mask), jnp.arange(start, stop, chunk)
        )
        parts.append(jnp.moveaxis(out, 0, 1).reshape(batch, stop - start, heads, -1))
    return jnp.concatenate(parts, axis=1)


def row_probabilities(
    q: Float[Array, "B R H D"],
    k: Float[Array, "B T H D"],
    rows: Int[Array, "B R"],
    scale: float,
) -> Float[Array, "B R T"]:
    """Dense attention at some query rows, the mean over heads; a constant for derivatives."""
    q, k = jax.lax.stop_gradient((q, k))
    visible = jnp.arange(k.shape[1]) <= rows[..., None]
    return jnp.mean(_softmax(q, k, visible, scale), axis=1)


def _softmax(q, k, visible, scale) -> Float[Array, "B H T S"]:
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * scale
    return jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)


def _attend_cudnn(q, k, v, mask, scale):
    # cuDNN's heads have one width: values are filled up with zeros.
    filled = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - v.shape[-1])))
    out = jax.nn.dot_product_attention(
        *(q, k, filled),
        mask=None if mask is None else mask[:, None],
        scale=scale,
        is_causal=True,
        implementation="cudnn",
    )
    return out[..., : v.shape[-1]]


def pick_implementation(asked: Literal["auto", "xla", "cudnn"], dtype: jnp.dtype) -> Implementation:
    """cuDNN where it runs both kinds of attention forward and backward here, else XLA.

    Raises:
        ValueError: "cudnn" was asked for, and fails.
    """
    if asked == "xla" or (asked == "auto" and jax.default_backend() != "gpu"):
        return "xla"
    try:
        q = jnp.ones((2, 256, 8, 64), dtype)
        v = q[..., :32]
        mask = jnp.tril(jnp.ones((2, 256, 256), bool))
        for m in (None, mask):
            loss = lambda q, v, m=m: _attend_cudnn(q, q, v, m, 0.1).astype(jnp.float32).sum()  # noqa: E731
            jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1)))(q, v))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if asked == "cudnn":
            raise ValueError(
                f"--attention cudnn does not run here ({reason}): use --attention xla."
            ) from error
        logger.warning("cuDNN attention does not run here (%s): using XLA", reason)
        return "xla"
    return "cudnn"
