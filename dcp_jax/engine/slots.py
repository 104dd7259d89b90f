"""What the devices remember of each running request, by slot, so that no step waits for the host.

Slots 0..S-1 are requests; slot S belongs to no request: padding rows and chunks that draw nothing
write there. All arrays are replicated on the mesh. A request whose parameters are all defaults is
the row that `fresh_slots` makes; others are loaded when they get their slot.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from dcp_jax.engine.sampler import SamplerOptions, SamplingBatch

Leaf = Any
# Edited tokens of one request (logit bias, and ends that min_tokens bans), at most.
EDITS = 512
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_DEFAULTS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)


class Knobs(NamedTuple):
    """Sampling parameters of every slot; a row of them, without the first axis, is one request's.

    Attributes:
        floats: float32 [S+1, 6], in the order of `FLOATS`.
        ints: int32 [S+1, 2]: top_k, and the bits of the uint32 seed.
        edit_ids, edit_until: int32 [S+1, M]; edit_values: float32 [S+1, M]: see `SamplingBatch`.
    """

    floats: Leaf
    ints: Leaf
    edit_ids: Leaf
    edit_values: Leaf
    edit_until: Leaf


class Slots(NamedTuple):
    """Everything by slot.

    Attributes:
        token: int32 [S+1], the newest token, which is not in the cache yet.
        knobs: sampling parameters.
        in_prompt: bool [S+1, V]; generated: int32 [S+1, V]: kept for requests with penalties only.
    """

    token: Leaf
    knobs: Knobs
    in_prompt: Leaf
    generated: Leaf


def default_knobs() -> Knobs:
    """Greedy, nothing edited: one request's row, on the host."""
    return Knobs(
        np.array(_DEFAULTS, np.float32),
        np.zeros(2, np.int32),
        np.full(EDITS, -1, np.int32),
        np.zeros(EDITS, np.float32),
        np.zeros(EDITS, np.int32),
    )


def fresh_slots(slots: int, vocab_size: int, mesh: Mesh) -> Slots:
    """`slots` empty slots and the one that nobody has, on the mesh."""
    rows = slots + 1
    host = Slots(
        np.zeros(rows, np.int32),
        Knobs(*(np.broadcast_to(leaf, (rows, *leaf.shape)) for leaf in default_knobs())),
        np.zeros((rows, vocab_size), bool),
        np.zeros((rows, vocab_size), np.int32),
    )
    return jax.device_put(host, NamedSharding(mesh, PartitionSpec()))


def load_slot(slots: Slots, slot: Array, knobs: Knobs) -> Slots:
    """A request takes a slot: its parameters in place of the last request's, no token seen."""
    return slots._replace(
        knobs=Knobs(*(all.at[slot].set(one) for all, one in zip(slots.knobs, knobs, strict=True))),
        in_prompt=slots.in_prompt.at[slot].set(False),
        generated=slots.generated.at[slot].set(0),
    )


def note_tokens(
    slots: Slots, slot: Array, prompt: Int[Array, " L"], generated: Int[Array, " L"]
) -> Slots:
    """Tokens that the request of a slot has so far; -1 pads."""
    nowhere = slots.in_prompt.shape[1]
    return slots._replace(
        in_prompt=slots.in_prompt.at[slot, jnp.where(prompt < 0, nowhere, prompt)].set(
            True, mode="drop"
        ),
        generated=slots.generated.at[slot, jnp.where(generated < 0, nowhere, generated)].add(
            1, mode="drop"
        ),
    )


def sampling_batch(
    knobs: Knobs,
    in_prompt: Leaf,
    generated: Leaf,
    slot: Int[Array, " B"],
    position: Int[Array, " B"],
    opts: SamplerOptions,
) -> SamplingBatch:
    """The sampler's rows for the requests of `slot`, which draw the token at `position`."""
    floats = dict(zip(FLOATS, knobs.floats[slot].T, strict=True))
    nothing = jnp.zeros((slot.shape[0], 0), jnp.int32)
    seen = (in_prompt[slot], generated[slot]) if opts.penalties else (nothing > 0, nothing)
    edits = (knobs.edit_ids, knobs.edit_values, knobs.edit_until)
    ids, values, until = (leaf[slot] for leaf in edits) if opts.edits else (nothing,) * 3
    return SamplingBatch(
        temperature=floats["temperature"],
        top_k=knobs.ints[slot, 0],
        top_p=floats["top_p"],
        min_p=floats["min_p"],
        seed=jax.lax.bitcast_convert_type(knobs.ints[slot, 1], jnp.uint32),
        position=position,
        repetition=floats["repetition"],
        presence=floats["presence"],
        frequency=floats["frequency"],
        in_prompt=seen[0],
        generated=seen[1],
        edit_ids=ids,
        edit_values=values.astype(jnp.float32),
        edit_until=until,
    )
