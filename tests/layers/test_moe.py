"""The mixture of experts against a numpy oracle that multiplies by every expert."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcp_jax.config import ModelConfig
from dcp_jax.layers import moe


@dataclass(frozen=True)
class Case:
    id: str
    tokens: int
    experts: int
    per_token: int
    skew: str = "random"


# Sizes on both sides of one pair per expert, of a full block, and of the largest block.
CASES = [
    Case("one-token", 1, 8, 2),
    Case("fewer-pairs-than-experts", 3, 16, 2),
    Case("one-pair-each", 8, 16, 2),
    Case("ragged-blocks", 37, 8, 3),
    Case("largest-block", 640, 8, 2),
    Case("beyond-the-largest-block", 1030, 8, 2),
    Case("all-to-one-expert", 65, 8, 1, "one"),
    Case("the-last-expert-only", 33, 8, 1, "last"),
    Case("every-expert", 5, 4, 4),
]


def oracle(x, experts, weights, gate_up, down):
    """Dense product over all experts in float64."""
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    gate, up = (np.einsum("nd,eid->nei", x, gate_up[:, half]) for half in (0, 1))
    each = np.einsum("nei,edi->ned", gate / (1 + np.exp(-gate)) * up, down)
    picked = np.take_along_axis(each, np.asarray(experts)[..., None], axis=1)
    return (picked * np.asarray(weights, np.float64)[..., None]).sum(1)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_grouped_experts_equal_the_dense_product(case):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(case.tokens, 12)).astype(np.float32)
    gate_up = rng.normal(size=(case.experts, 2, 10, 12)).astype(np.float32)
    down = rng.normal(size=(case.experts, 12, 10)).astype(np.float32)
    weights = rng.uniform(size=(case.tokens, case.per_token)).astype(np.float32)
    experts = np.argsort(rng.random((case.tokens, case.experts)), axis=1)[:, : case.per_token]
    if case.skew != "random":
        experts = np.full_like(experts, 0 if case.skew == "one" else case.experts - 1)
    args = x, experts.astype(np.int32), weights, gate_up, down
    got = jax.jit(moe.grouped_swiglu)(*map(jnp.asarray, args))
    want = oracle(*args)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max(), rtol=0)


def test_no_product_over_all_experts():
    """Work grows with the pairs, not with tokens x experts."""

    def flops(experts):
        shapes = (64, 8), (64, 1), (64, 1), (experts, 2, 16, 8), (experts, 8, 16)
        dtypes = jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32
        args = map(jax.ShapeDtypeStruct, shapes, dtypes)
        jaxpr = jax.jit(moe.grouped_swiglu).trace(*args).jaxpr
        (loop,) = [e for e in _equations(jaxpr.jaxpr) if e.primitive.name == "scan"]
        (body,) = [v for v in loop.params.values() if hasattr(v, "jaxpr")]
        dots = [e for e in _equations(body.jaxpr) if e.primitive.name == "dot_general"]
        return loop.params["length"] * sum(e.outvars[0].aval.size for e in dots)

    assert flops(32) <= 64 * (16 + 16 + 8) * 2
    assert flops(64) == flops(256) == 64 * (16 + 16 + 8)


def _equations(jaxpr):
    from jax.extend.core import jaxprs_in_params

    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def test_the_bias_chooses_but_does_not_weigh(golden):
    cfg = ModelConfig.from_hf(golden("p3").path)
    gate = jnp.eye(8, 8)
    x = jnp.asarray([[3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0]])
    bias = jnp.zeros(8).at[7].set(5.0)
    experts, weights = moe.route(x, gate, bias, cfg)
    assert sorted(experts[0].tolist()) == [0, 7]
    sigmoid = 1 / (1 + np.exp(-np.array([-1.0, 3.0])))
    order = np.argsort(experts[0])[::-1]
    expected = sigmoid / sigmoid.sum() * cfg.routed_scaling_factor
    np.testing.assert_allclose(weights[0][order], expected, rtol=1e-6)


def test_groups_are_ranked_by_their_two_best_and_others_are_out(golden):
    cfg = replace(ModelConfig.from_hf(golden("p2").path), topk_group=1, num_experts_per_tok=2)
    # Group 0 has the best single expert, group 2 the best pair (groups of two experts).
    logits = jnp.asarray([[4.0, -9.0, -1.0, -1.0, 2.0, 1.0, 0.0, 0.0]])
    experts, _ = moe.route(logits, jnp.eye(8), jnp.zeros(8), cfg)
    assert sorted(experts[0].tolist()) == [4, 5]
    # A bias below zero everywhere must not let the masked experts win with a score of 0.
    experts, _ = moe.route(logits, jnp.eye(8), jnp.full(8, -3.0), cfg)
    assert sorted(experts[0].tolist()) == [4, 5]
