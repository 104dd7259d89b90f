"""Sampling on the devices: penalties, filters, seeded noise and log-probabilities of one step.

Each row draws its noise from its own seed and position alone, so a request's text does not depend
on what else is in the batch. Every rank of the tensor-parallel group computes the same from the
same gathered logits, so all agree on the token.

Order of the operations, as in vLLM: logit bias and banned tokens, penalties, temperature, min-p,
top-k, top-p. Log-probabilities are those of the model's own logits, before any of it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from dcp_jax.dcp.collectives import gather_vocab
from dcp_jax.mesh import TP

# Arrays of numpy (the host builds them) or of jax (in a traced step).
HostArray = Any


@dataclass(frozen=True)
class SamplerOptions:
    """Which parts of the sampler a step needs: static, so that a step pays only for those.

    Attributes:
        filters: any row has a temperature above 0 (noise, top-k, top-p, min-p).
        penalties: any row has a penalty.
        edits: any row has a logit bias or banned tokens.
        top_logprobs: most likely tokens to report, -1 for no log-probabilities at all.
    """

    filters: bool = False
    penalties: bool = False
    edits: bool = False
    top_logprobs: int = -1


class SamplingBatch(NamedTuple):
    """Per-row sampling values, one row per row of the batch.

    Attributes:
        temperature: float32 [B]; 0 takes the most likely token.
        top_k: int32 [B]; 0 keeps all. top_p, min_p: float32 [B].
        seed: uint32 [B]. position: int32 [B], tokens before the one to draw.
        repetition, presence, frequency: float32 [B]; 1, 0 and 0 change nothing.
        in_prompt: bool [B, V], tokens of the prompt. generated: int32 [B, V], how often each token
            was generated. Both are [B, 0] where no step asks for penalties.
        edit_ids: int32 [B, M], tokens whose logit changes by edit_values float32 [B, M] (-inf
            bans) while `position` is below edit_until int32 [B, M]; -1 pads.
    """

    temperature: HostArray
    top_k: HostArray
    top_p: HostArray
    min_p: HostArray
    seed: HostArray
    position: HostArray
    repetition: HostArray
    presence: HostArray
    frequency: HostArray
    in_prompt: HostArray
    generated: HostArray
    edit_ids: HostArray
    edit_values: HostArray
    edit_until: HostArray


class Sampled(NamedTuple):
    """Tokens int32 [B]; if asked for, their log-probabilities and ranks, and the best tokens'."""

    tokens: HostArray
    logprobs: HostArray | None = None
    ranks: HostArray | None = None
    top_tokens: HostArray | None = None
    top_logprobs: HostArray | None = None


def sample_step(
    logits: Float[Array, "B V"],
    batch: SamplingBatch,
    mesh: Mesh,
    vocab_size: int,
    opts: SamplerOptions,
) -> Sampled:
    """`sample` of vocabulary-sharded logits: one all-gather, then every rank draws the same.

    Args:
        logits: float32, sharded over the tensor-parallel group, padding tokens at the end.
        batch: per-row values.
        mesh: of the model.
        vocab_size: tokens that exist.
        opts: static options.
    """
    scored = opts.top_logprobs >= 0
    replicated = PartitionSpec()
    return jax.shard_map(
        lambda part, batch: sample(gather_vocab(part)[:, :vocab_size], batch, opts),
        mesh=mesh,
        in_specs=(PartitionSpec(None, TP), replicated),
        out_specs=Sampled(replicated, *(replicated if scored else None for _ in range(4))),
        check_vma=False,
    )(logits, batch)


def sample(logits: Float[Array, "B V"], batch: SamplingBatch, opts: SamplerOptions) -> Sampled:
    """Draw one token per row; pure, on whole logits."""
    edited = logits
    if opts.edits:
        edited = _edit(edited, batch)
    if opts.penalties:
        edited = _penalise(edited, batch)
    tokens = jnp.argmax(edited, axis=-1).astype(jnp.int32)
    if opts.filters:
        tokens = jnp.where(batch.temperature > 0, _draw(edited, batch), tokens)
    if opts.top_logprobs < 0:
        return Sampled(tokens)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    rank = 1 + jnp.sum(logprobs > own[:, None], axis=-1, dtype=jnp.int32)
    best, ids = jax.lax.top_k(logprobs, min(opts.top_logprobs, logits.shape[-1]))
    return Sampled(tokens, own, rank, ids.astype(jnp.int32), best)


def _edit(logits: Array, batch: SamplingBatch) -> Float[Array, "B V"]:
    """Add a value to some tokens' logits; -inf bans a token."""
    row = jnp.arange(logits.shape[0])[:, None]
    column = jnp.where(batch.edit_ids < 0, logits.shape[1], batch.edit_ids)
    applies = batch.position[:, None] < batch.edit_until
    return logits.at[row, column].add(jnp.where(applies, batch.edit_values, 0), mode="drop")


def _penalise(logits: Array, batch: SamplingBatch) -> Float[Array, "B V"]:
    """Repetition (CTRL, arXiv 1909.05858) over all tokens seen, the others over generated ones."""
    count = batch.generated.astype(jnp.float32)
    factor = batch.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(batch.in_prompt | (count > 0), repeated, logits)
    logits = logits - batch.frequency[:, None] * count
    return logits - batch.presence[:, None] * (count > 0)


def _draw(logits: Array, batch: SamplingBatch) -> Int[Array, " B"]:
    """One draw per row from its filtered distribution, by the Gumbel trick.

    Filters keep a prefix of the row in the order (probability descending, token id ascending), so
    equal probabilities at a threshold are cut the same way everywhere. The noise belongs to token
    ids, not to places in that order.
    """
    temperature = jnp.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
    scaled = logits / temperature
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    place = jnp.arange(logits.shape[-1])
    # min-p and top-k first; top-p then counts the mass of what they keep.
    likely = ranked >= ranked[:, :1] + jnp.log(batch.min_p)[:, None]
    kept = likely & ((batch.top_k[:, None] <= 0) | (place < batch.top_k[:, None]))
    mass = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    kept &= (before < batch.top_p[:, None]) | (place == 0)
    noise = jax.vmap(lambda seed, position: _gumbel(seed, position, logits.shape[-1]))(
        batch.seed, batch.position
    )
    noisy = ranked + jnp.take_along_axis(noise, order, axis=-1)
    best = jnp.argmax(jnp.where(kept, noisy, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _gumbel(seed: Array, position: Array, size: int) -> Float[Array, " V"]:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,), jnp.float32)
