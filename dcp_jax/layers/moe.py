"""Feed-forward layers: dense SwiGLU, and the mixture of experts with a sigmoid router ("noaux_tc").

Every expert is split over the whole tensor-parallel group (its intermediate dimension), so each
rank computes a part of every hit expert and one sum per layer finishes routed and shared experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dcp_jax.config import ModelConfig
from dcp_jax.dcp.collectives import tp_sum
from dcp_jax.layers.linear import einsum
from dcp_jax.layers.param import param
from dcp_jax.layers.quantized import BlockWeight

# Tokens per block of the grouped product: at most this many share one read of an expert's weights.
MAX_BLOCK = 128


class SwiGLU(nnx.Module):
    """`down(silu(gate x) * up x)`, the intermediate dimension sharded."""

    def __init__(self, hidden: int, intermediate: int, dtype: jnp.dtype):
        """`intermediate` is the padded global size."""
        self.gate_up_proj = param((2, intermediate, hidden), dtype, (None, "mlp"))
        self.down_proj = param((hidden, intermediate), dtype, (None, "mlp"))

    def partial(self, x: Float[Array, "B T d"]) -> Float[Array, "B T d"]:
        """This rank's part, to be summed over the tensor-parallel group."""
        return swiglu(x, self.gate_up_proj[...], self.down_proj[...])

    def __call__(self, x: Float[Array, "B T d"]) -> tuple[Float[Array, "B T d"], None]:
        """The layer's output; None stands for the expert choices of a sparse layer."""
        return tp_sum(self.partial(x)), None


def swiglu(
    x: Float[Array, "*N d"],
    gate_up: Float[Array, "2 I d"] | BlockWeight,
    down: Float[Array, "d I"] | BlockWeight,
) -> Float[Array, "*N d"]:
    """SwiGLU of given weights."""
    gate, up = einsum("...d,id->...i", x, gate_up[0]), einsum("...d,id->...i", x, gate_up[1])
    return einsum("...i,di->...d", jax.nn.silu(gate) * up, down)


def route(
    x: Float[Array, "N d"],
    gate: Float[Array, "E d"],
    correction_bias: Float[Array, " E"],
    cfg: ModelConfig,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Experts and weights of each token, in float32 (DeepSeek-V3, arXiv 2412.19437, eq. 12-16).

    The bias decides which experts, never their weights. With groups, only the `topk_group` groups
    with the largest sum of their two best experts take part.
    """
    scores = jax.nn.sigmoid(
        jnp.einsum("nd,ed->ne", x.astype(jnp.float32), gate, precision="highest")
    )
    biased = scores + correction_bias
    if cfg.n_group > 1:
        groups = biased.reshape(biased.shape[0], cfg.n_group, -1)
        best_two = jax.lax.top_k(groups, 2)[0].sum(-1)
        _, kept = jax.lax.top_k(best_two, cfg.topk_group)
        allowed = jnp.any(kept[..., None] == jnp.arange(cfg.n_group), axis=-2)
        biased = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(biased.shape)
    _, experts = jax.lax.top_k(biased, cfg.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if cfg.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * cfg.routed_scaling_factor


def grouped_swiglu(
    x: Float[Array, "N d"],
    experts: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate_up: Float[Array, "E 2 I d"] | BlockWeight,
    down: Float[Array, "E d I"] | BlockWeight,
) -> Float[Array, "N d"]:
    """Weighted sum of each token's experts, multiplying by the hit experts only.

    (token, expert) pairs are sorted by expert and cut into blocks of one expert each; a loop over
    blocks multiplies by that expert's weights. Work is at most twice the pairs' own plus one block
    per expert; memory is one block's.
    """
    tokens, per_token = experts.shape
    pairs, n_experts = tokens * per_token, gate_up.shape[0]
    # About the mean number of pairs per expert, so that padding at most doubles the work.
    block = min(MAX_BLOCK, max(1, pairs // n_experts))
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=n_experts)
    first_pair = jnp.cumsum(sizes) - sizes
    blocks_of = -(-sizes // block)
    last_block = jnp.cumsum(blocks_of)
    n_blocks = pairs if block == 1 else min(pairs, -(-pairs // block) + n_experts)

    number = jnp.arange(n_blocks)
    expert = jnp.minimum(jnp.searchsorted(last_block, number, side="right"), n_experts - 1)
    place = (number - (last_block - blocks_of)[expert])[:, None] * block + jnp.arange(block)
    real = (place < sizes[expert][:, None]) & (number < last_block[-1])[:, None]
    # Each (token, expert) pair has a place of its own: sums over experts happen in a fixed order.
    pair = jnp.where(real, order[jnp.where(real, first_pair[expert][:, None] + place, 0)], pairs)

    def multiply(parts, this):
        pair, expert = this
        y = swiglu(x[jnp.minimum(pair // per_token, tokens - 1)], gate_up[expert], down[expert])
        return parts.at[pair].set(y, mode="drop"), None

    parts, _ = jax.lax.scan(multiply, jnp.zeros((pairs, x.shape[-1]), x.dtype), (pair, expert))
    parts = parts.reshape(tokens, per_token, -1)
    return jnp.einsum("nkd,nk->nd", parts.astype(jnp.float32), weights).astype(x.dtype)


class MoE(nnx.Module):
    """Routed experts plus the always-on shared expert."""

    def __init__(self, cfg: ModelConfig, expert_size: int, shared_size: int, dtype: jnp.dtype):
        """`expert_size` and `shared_size` are padded global intermediate sizes."""
        self.cfg = cfg
        n, hidden = cfg.n_routed_experts, cfg.hidden_size
        self.gate = param((n, hidden), jnp.float32)
        self.e_score_correction_bias = param((n,), jnp.float32)
        self.experts_gate_up = param((n, 2, expert_size, hidden), dtype, (None, None, "mlp"))
        self.experts_down = param((n, hidden, expert_size), dtype, (None, None, "mlp"))
        self.shared = SwiGLU(hidden, shared_size, dtype)

    def __call__(
        self, x: Float[Array, "B T d"]
    ) -> tuple[Float[Array, "B T d"], Int[Array, "B T k"]]:
        """The layer's output and each token's experts."""
        flat = x.reshape(-1, x.shape[-1])
        experts, weights = route(flat, self.gate[...], self.e_score_correction_bias[...], self.cfg)
        routed = grouped_swiglu(
            flat, experts, weights, self.experts_gate_up[...], self.experts_down[...]
        )
        return tp_sum(routed.reshape(x.shape) + self.shared.partial(x)), experts.reshape(
            *x.shape[:-1], -1
        )
