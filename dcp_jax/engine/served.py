"""What one launch of the engine computes: forward and draw, once or several times. Pure functions.

A launch reads each row's newest token from the slots unless the host gives it, and writes the drawn
one back: the next launch can start before the host has seen it.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dcp_jax.cache.pool import CacheSpec, KVCache
from dcp_jax.dcp.step import Batch, StepOptions
from dcp_jax.engine.sampler import Sampled, SamplerOptions, sample_step
from dcp_jax.engine.sampling_params import MAX_LOGPROBS
from dcp_jax.engine.slots import Knobs, sampling_batch
from dcp_jax.layers.stacked import Stacked, unstack
from dcp_jax.model import Model

# The sampler's parts behind the names of `ladder.SAMPLERS`; None is the model's own argmax.
SAMPLER_OPTIONS: dict[str, SamplerOptions | None] = {
    "greedy": None,
    "drawn": SamplerOptions(filters=True),
    "full": SamplerOptions(True, True, True, MAX_LOGPROBS),
}
# Columns of a row before its page table: slot, tokens cached, new tokens or steps, slot written.
HEADER = 4


class Carry(NamedTuple):
    """What a launch updates in place; donated.

    Attributes:
        cache: both caches.
        token: int32 [S+1], newest token by slot.
        generated: int32 [S+1, V], counts by slot; None where the sampler needs none.
    """

    cache: KVCache
    token: Int[Array, " S"]
    generated: Int[Array, "S V"] | None


class Drawn(NamedTuple):
    """Result of a launch; axis N is its decode steps (1 for a prefill).

    Attributes:
        sampled: tokens [N, B] and, with the full sampler, log-probabilities.
        certified: bool [B]; a row that is not certified in any step has to be launched again.
    """

    sampled: Sampled
    certified: Bool[Array, " B"]


class Fixed(NamedTuple):
    """What a launch reads by slot; None where the sampler does not."""

    knobs: Knobs | None
    in_prompt: Bool[Array, "S V"] | None


def serve_prefill(
    model: Model,
    spec: CacheSpec,
    opts: StepOptions,
    sampler: str,
    params: Stacked,
    carry: Carry,
    fixed: Fixed,
    tokens: Int[Array, "B T"],
    rows: Int[Array, "B C"],
) -> tuple[Drawn, Carry]:
    """A chunk of each row's prompt; rows with a slot to write draw the token that follows it.

    Args:
        model: static; so are spec, opts and the sampler's name.
        spec: of the caches.
        opts: options of the step.
        sampler: a key of `SAMPLER_OPTIONS`.
        params: of the model, small ones stacked.
        carry: donated.
        fixed: read only.
        tokens: new tokens, padded on the right.
        rows: int32 [B, 4 + P]: slot, tokens cached, new tokens (0: inert), slot that the drawn
            token is written to (the last one: nobody's); pages.
    """
    header, pages = rows[:, :HEADER], rows[:, HEADER:]
    slot, start, length, target = header.T
    whole = unstack(params)
    batch = Batch(tokens, start, length, pages)
    sampled, certified, carry = _draw(
        model, spec, opts, sampler, whole, carry, fixed, batch, slot, target
    )
    return Drawn(jax.tree.map(lambda a: a[None], sampled), certified), carry


def serve_decode(
    model: Model,
    spec: CacheSpec,
    opts: StepOptions,
    sampler: str,
    steps: int,
    params: Stacked,
    carry: Carry,
    fixed: Fixed,
    tokens: Int[Array, "B 1"],
    rows: Int[Array, "B C"],
) -> tuple[Drawn, Carry]:
    """`steps` tokens for each row; a row is inert after as many as its third column says.

    Arguments as `serve_prefill`; `tokens` is -1 where the slot's own newest token is read.
    """
    header, pages = rows[:, :HEADER], rows[:, HEADER:]
    slot, start, count, _ = header.T
    nobody = carry.token.shape[0] - 1
    given = jnp.where(tokens[:, 0] >= 0, slot, nobody)
    carry = carry._replace(token=carry.token.at[given].set(tokens[:, 0]))
    whole = unstack(params)

    def one(carry: Carry, i: Array) -> tuple[Carry, Drawn]:
        active = i < count
        where = jnp.where(active, slot, nobody)
        batch = Batch(
            jnp.maximum(carry.token[slot], 0)[:, None], start + i, active.astype(jnp.int32), pages
        )
        sampled, certified, carry = _draw(
            model, spec, opts, sampler, whole, carry, fixed, batch, slot, where
        )
        return carry, Drawn(sampled, certified)

    if steps == 1:
        carry, drawn = one(carry, jnp.int32(0))
        return drawn._replace(sampled=jax.tree.map(lambda a: a[None], drawn.sampled)), carry
    carry, drawn = jax.lax.scan(one, carry, jnp.arange(steps, dtype=jnp.int32))
    return drawn._replace(certified=jnp.all(drawn.certified, axis=0)), carry


def _draw(
    model, spec, opts, sampler, params, carry, fixed, batch, slot, target
) -> tuple[Sampled, Bool[Array, " B"], Carry]:
    """One forward step; the token after each row goes to the slot `target`."""
    options = SAMPLER_OPTIONS[sampler]
    if options is None:
        output, cache = model.forward(params, carry.cache, batch, spec=spec, opts=opts)
        drawn = Sampled(output.next_tokens)
        return drawn, output.certified, Carry(cache, carry.token.at[target].set(drawn.tokens), None)
    last = replace(opts, logits="last")
    output, cache = model.forward(params, carry.cache, batch, spec=spec, opts=last)
    position = batch.starts + batch.lengths
    values = sampling_batch(fixed.knobs, fixed.in_prompt, carry.generated, slot, position, options)
    logits: Float[Array, "B V"] = output.logits[:, 0]
    drawn = sample_step(logits, values, model.mesh, model.cfg.vocab_size, options)
    generated = carry.generated
    if generated is not None:
        generated = generated.at[target, drawn.tokens].add(1)
    token = carry.token.at[target].set(drawn.tokens)
    return drawn, output.certified, Carry(cache, token, generated)
