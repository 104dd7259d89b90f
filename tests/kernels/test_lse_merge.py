"""Merge of partial attentions: natural logarithm, float32, (0, -inf) as the identity."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.lse_merge import merge_partials, merge_two

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Case:
    """One query with a value of one channel per partial."""

    id: str
    outs: list[float]
    lses: list[float]
    out: float
    lse: float


CASES = [
    Case("natural_base", [1.0, -1.0], [math.log(2), math.log(8)], -0.6, math.log(10)),
    Case(
        "suffix_of_a_long_prefix",
        [0.0, 1.0],
        [math.log(3072), math.log(64)],
        64 / 3136,
        math.log(3136),
    ),
    Case("one_to_four", [0.0, 10.0], [math.log(2), math.log(8)], 8.0, math.log(10)),
    Case("identity", [0.0, 3.0], [-INF, 1.5], 3.0, 1.5),
    Case("nan_in_an_empty_partial", [NAN, 3.0], [-INF, 1.5], 3.0, 1.5),
    Case("inf_in_an_empty_partial", [INF, 3.0], [-INF, 1.5], 3.0, 1.5),
    Case("plus_inf_is_empty_too", [NAN, 3.0], [INF, 1.5], 3.0, 1.5),
    Case("plus_inf_beside_minus_inf", [NAN, NAN, 3.0], [INF, -INF, 1.5], 3.0, 1.5),
    Case("all_empty", [NAN, 5.0], [-INF, -INF], 0.0, -INF),
    Case("all_empty_by_plus_inf", [NAN, NAN], [INF, INF], 0.0, -INF),
    Case("one_partial", [2.0], [-7.0], 2.0, -7.0),
    Case("far_below_any_sentinel", [2.0, 0.0], [-5.2e5, -INF], 2.0, -5.2e5),
    Case("far_apart", [2.0, 4.0], [-1e5, 300.0], 4.0, 300.0),
    Case("large_and_equal", [2.0, 4.0], [8192.0, 8192.0], 3.0, 8192 + math.log(2)),
]


@pytest.mark.parametrize(
    "merge", [merge_partials, reference.merge_partials], ids=["xla", "reference"]
)
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_merge(case, merge):
    out, lse = merge(jnp.array(case.outs)[:, None, None], jnp.array(case.lses)[:, None])
    assert out.shape == (1, 1)
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(out[0, 0], case.out, rtol=1e-6)
    np.testing.assert_allclose(lse[0], case.lse, rtol=1e-6)


def partials(seed, n_ranks=8, rows=(3, 5), dim=16):
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal((n_ranks, *rows, dim)).astype(np.float32)
    lses = (5 * rng.standard_normal((n_ranks, *rows))).astype(np.float32)
    empty = rng.random((n_ranks, *rows)) < 0.4
    empty[:, 0, 0] = True
    outs[empty], lses[empty] = NAN, rng.choice([-INF, INF], empty.sum())
    return outs, lses, empty


def merge_float64(outs, lses, empty):
    weights = np.where(empty, 0.0, np.exp(np.where(empty, 0.0, lses).astype(np.float64)))
    total = weights.sum(axis=0)
    out = (np.where(empty[..., None], 0.0, outs) * weights[..., None]).sum(axis=0)
    with np.errstate(divide="ignore"):
        return out / np.maximum(total, 1e-300)[..., None], np.log(total)


def test_random_partials_with_poisoned_empties():
    outs, lses, empty = partials(0)
    out, lse = jax.jit(merge_partials)(jnp.asarray(outs), jnp.asarray(lses))
    expected_out, expected_lse = merge_float64(outs, lses, empty)
    assert (np.isinf(lse) == empty.all(axis=0)).all()
    assert (np.asarray(out)[0, 0] == 0).all()
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)


def test_transposed_partials_and_bfloat16_outs():
    outs, lses, empty = partials(1)
    strided = (
        jnp.asarray(np.moveaxis(outs, 0, -1).copy()),
        jnp.asarray(np.moveaxis(lses, 0, -1).copy()),
    )
    out, lse = merge_partials(*(jnp.moveaxis(x, -1, 0) for x in strided))
    assert np.array_equal(out, merge_partials(jnp.asarray(outs), jnp.asarray(lses))[0])
    rounded = jnp.asarray(outs).astype(jnp.bfloat16)
    out, lse = merge_partials(rounded, jnp.asarray(lses))
    assert out.dtype == jnp.float32
    expected_out, expected_lse = merge_float64(np.asarray(rounded, np.float32), lses, empty)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)


def test_running_merge_equals_one_merge_and_starts_from_the_identity():
    outs, lses, _ = partials(2)
    out, lse = jnp.zeros(outs.shape[1:]), jnp.full(lses.shape[1:], -jnp.inf)
    for part in zip(jnp.asarray(outs), jnp.asarray(lses), strict=True):
        out, lse = merge_two(out, lse, *part)
    expected_out, expected_lse = merge_partials(jnp.asarray(outs), jnp.asarray(lses))
    assert (np.isinf(lse) == np.isinf(expected_lse)).all()
    np.testing.assert_allclose(out, expected_out, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6)


def test_78_chained_merges_in_float32_drift_less_than_a_bfloat16_exchange():
    """A layer stack where each output feeds the next: what `merge_dtype` = bf16 would cost."""
    rng = np.random.default_rng(0)
    lses = jnp.asarray(rng.standard_normal((78, 8, 4)), jnp.float32)
    mixes = jnp.asarray(rng.standard_normal((78, 8, 32, 32)) / np.sqrt(32), jnp.float32)

    @jax.jit
    def chain(hidden, rounded):
        for lse, mix in zip(lses, mixes, strict=True):
            outs = jnp.einsum("td,wde->wte", hidden, mix, precision="highest")
            outs = jnp.where(rounded, outs.astype(jnp.bfloat16).astype(jnp.float32), outs)
            hidden = hidden + 0.1 * merge_partials(outs, lse)[0]
        return hidden

    start = rng.standard_normal((4, 32))
    exact = start.copy()
    for lse, mix in zip(np.asarray(lses, np.float64), np.asarray(mixes, np.float64), strict=True):
        weights = np.exp(lse) / np.exp(lse).sum(axis=0)
        exact = exact + 0.1 * np.einsum("wt,td,wde->te", weights, exact, mix)
    drift = [np.abs(chain(jnp.asarray(start, jnp.float32), r) - exact).max() for r in (False, True)]
    assert drift[0] < 1e-5
    assert drift[1] > 20 * drift[0]
