"""Merge of partial attentions (out, lse): float32, natural logarithm.

(0, -inf) is the identity. A partial with lse = -inf is empty, and so is one with +inf (FlashMLA
marks a query without keys so); an empty partial is left out by selection, because its out may be
NaN. All empty: (0, -inf).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import pick


def merge_partials(
    outs: Float[Array, "W *rows D"],
    lses: Float[Array, " W *rows"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """The softmax-weighted mean of W partials and its lse, in a fixed order of summation."""
    return pick("merge_partials", implementation, {"xla": _merge_partials_xla})(outs, lses)


def merge_two(
    out_a: Float[Array, "*rows D"],
    lse_a: Float[Array, "*rows"],
    out_b: Float[Array, "*rows D"],
    lse_b: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """`merge_partials` of two, for running merges over chunks of keys."""
    return merge_partials(
        jnp.stack([out_a.astype(jnp.float32), out_b.astype(jnp.float32)]),
        jnp.stack([lse_a.astype(jnp.float32), lse_b.astype(jnp.float32)]),
    )


def merge_weights(lses: Float[Array, " W *rows"]) -> Float[Array, " W *rows"]:
    """Each partial's share of the merged result; exactly 0 for an empty one, all 0 if all are."""
    lses = jnp.where(jnp.isinf(lses), -jnp.inf, lses.astype(jnp.float32))
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top))
    return weights / jnp.where(top == -jnp.inf, 1.0, jnp.sum(weights, axis=0))


def _merge_partials_xla(outs, lses):
    with jax.named_scope("merge_partials"):
        outs, lses = outs.astype(jnp.float32), lses.astype(jnp.float32)
        empty = jnp.isinf(lses)
        weights = merge_weights(lses)
        outs = jnp.where(empty[..., None], 0.0, outs)
        out = jnp.sum(outs * weights[..., None], axis=0)
        return out, jax.nn.logsumexp(jnp.where(empty, -jnp.inf, lses), axis=0)
