"""Token embedding and output head, both sharded over the vocabulary."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dcp_jax.dcp.collectives import axis_size, tp_rank, tp_sum
from dcp_jax.layers.linear import linear32
from dcp_jax.mesh import TP


def embed(tokens: Int[Array, "B T"], table: Float[Array, "V d"]) -> Float[Array, "B T d"]:
    """Rows of a vocabulary-sharded table; each token's row lives on one rank, one sum shares it."""
    local = tokens - tp_rank() * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.where(mine, local, 0)]
    return tp_sum(jnp.where(mine[..., None], rows, 0))


def local_logits(
    hidden: Float[Array, "B T d"], head: Float[Array, "V d"], vocab_size: int
) -> Float[Array, "B T V"]:
    """float32 logits of this rank's part of the vocabulary; padding tokens are -inf."""
    logits = linear32(hidden, head)
    token = tp_rank() * head.shape[0] + jnp.arange(head.shape[0])
    return jnp.where(token < vocab_size, logits, -jnp.inf)


def argmax_token(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The best token over all shards, the lowest id among equals; 8 bytes a row and rank."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    value = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    token = best + tp_rank().astype(jnp.int32) * logits.shape[-1]
    if axis_size(TP) == 1:
        return token
    pair = jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), token])
    with jax.named_scope("exchange.argmax"):
        pairs = jax.lax.all_gather(pair, TP, axis=0)
    values = jax.lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
    # Shards stand in order of token id, so the first best shard holds the lowest id.
    return jnp.take_along_axis(pairs[:, 1], jnp.argmax(values, axis=0)[None], axis=0)[0]
