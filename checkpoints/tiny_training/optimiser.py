"""AdamW whose whole state takes seven bytes a parameter, and one training step.

Parameters are float32 with the last 8 bits zero (16 bits of mantissa: 1e-5 of a weight, a hundredth
of the smallest step taken), both moments are bfloat16; arithmetic is float32. So a state that fits
into 64 MiB is the whole state, and a run goes on from it bit by bit.

Gradients are clipped apart for the indexers and for the rest: neither can starve the other.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dcp_jax.config import ModelConfig
from tiny_training.attention import Implementation
from tiny_training.documents import Batch
from tiny_training.losses import losses
from tiny_training.model import ForwardOptions, forward
from tiny_training.stages import Stage

B1, B2, EPSILON, WEIGHT_DECAY, CLIP = 0.9, 0.98, 1e-8, 0.05, 1.0
GROUPS = ("main", "indexer")


class TrainState(NamedTuple):
    """Parameters and moments, nested dicts of equal structure; `count` steps were taken."""

    params: dict
    mean: dict
    square: dict
    count: Array


def init_state(params: dict) -> TrainState:
    """A state before the first step."""
    params = jax.tree.map(round_24, params)
    mean, square = (jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.bfloat16), params) for _ in "ms")
    return TrainState(params, mean, square, jnp.int32(0))


def round_24(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The nearest float32 whose last 8 bits are zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + 0x80) & jnp.uint32(0xFFFFFF00)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def group_of(path: tuple) -> str:
    """The clipping group of a parameter."""
    return "indexer" if any(key.key == "indexer" for key in path) else "main"


def global_norms(gradients: dict) -> dict[str, Float[Array, ""]]:
    """The norm of each group's gradient."""
    squares = {group: jnp.float32(0) for group in GROUPS}
    for path, g in jax.tree_util.tree_leaves_with_path(gradients):
        squares[group_of(path)] += jnp.sum(jnp.square(g))
    return {group: jnp.sqrt(square) for group, square in squares.items()}


def adamw(
    state: TrainState, gradients: dict, norms: dict[str, Array], lr: Float[Array, ""]
) -> TrainState:
    """One update. Matrices decay, but not the embedding; vectors do not."""
    count = state.count + 1
    corrections = 1 - B1 ** count.astype(jnp.float32), 1 - B2 ** count.astype(jnp.float32)
    scale = {group: jnp.minimum(1.0, CLIP / (norm + 1e-12)) for group, norm in norms.items()}

    def update(path, p, m, v, g):
        g = g * scale[group_of(path)]
        m = B1 * m.astype(jnp.float32) + (1 - B1) * g
        v = B2 * v.astype(jnp.float32) + (1 - B2) * g * g
        step = (m / corrections[0]) / (jnp.sqrt(v / corrections[1]) + EPSILON)
        decay = WEIGHT_DECAY if p.ndim > 1 and path[-1].key != "embed" else 0.0
        new = round_24(p - lr * (step + decay * p))
        return new, m.astype(jnp.bfloat16), v.astype(jnp.bfloat16)

    updated = jax.tree_util.tree_map_with_path(
        update, state.params, state.mean, state.square, gradients
    )
    outer = jax.tree.structure(state.params)
    parts = jax.tree.transpose(outer, jax.tree.structure((0, 0, 0)), updated)
    return TrainState(*parts, count)


def balance(params: dict, loads: dict[int, Array], rate: float) -> dict:
    """Correction biases moved towards an even load (DeepSeek-V3, arXiv 2412.19437, 2.1.2)."""

    def move(path, value):
        if path[-1].key != "e_score_correction_bias":
            return value
        # The MTP layer's number comes after all others.
        layer = int(path[1].key) if path[0].key == "layers" else max(loads)
        return round_24(value + rate * jnp.sign(jnp.mean(loads[layer]) - loads[layer]))

    return jax.tree_util.tree_map_with_path(move, params)


def make_step(
    cfg: ModelConfig, stage: Stage, attention: Implementation, dtype: jnp.dtype
) -> Callable[[TrainState, Batch, Array], tuple[TrainState, dict, Array]]:
    """The step of a stage: (state, batch, lr) -> (state, metrics, correct [B, A]). Not jitted."""
    opts = ForwardOptions(stage.sparse, stage.fp8, stage.drafts, attention)

    def loss(params, batch):
        tokens = batch.tokens[:, : stage.length + stage.drafts].astype(jnp.int32)
        result = forward(params, cfg, tokens, batch.rows, opts, dtype)
        found = losses(result, batch, index_topk=cfg.index_topk, margin_weight=stage.margin)
        return found.total, (found.metrics, found.correct, result.loads)

    def step(state: TrainState, batch: Batch, lr: Array):
        gradients, (metrics, correct, loads) = jax.grad(loss, has_aux=True)(state.params, batch)
        norms = global_norms(gradients)
        state = adamw(state, gradients, norms, lr)
        if stage.balance:
            state = state._replace(params=balance(state.params, loads, stage.balance))
        metrics |= {f"gradient/{group}": norm for group, norm in norms.items()}
        return state, metrics, correct

    return step


def parameter_count(params: dict) -> int:
    """Numbers in all parameters."""
    return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params))
