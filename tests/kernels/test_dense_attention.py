"""Dense attention against the reference and float64, whatever stands behind the visible keys."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.dense_attention import dense_attention

attend = jax.jit(dense_attention, static_argnames=("scale", "implementation", "budget"))
SCALE = 0.3
# Scores take 12 bytes per key and head: below, one query's; a few queries'; a few rows'.
BUDGETS = {"one_block": 2**26, "one_query": 1, "queries": 3_000, "rows": 20_000}


@dataclass(frozen=True)
class Case:
    """`prefixes[b]` keys come before the first of `lengths[b]` real queries of row b."""

    id: str
    prefixes: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int = 7
    keys: int = 19
    heads: int = 3
    dim: int = 12
    value: int = 12
    dtype: str = "float32"

    @property
    def visible(self) -> np.ndarray:
        token = np.arange(self.tokens)
        first = np.array(self.prefixes)[:, None]
        real = token < np.array(self.lengths)[:, None]
        return np.where(real, first + token + 1, 0).astype(np.int32)


CASES = [
    Case("causal", (0, 0), (7, 7)),
    Case("causal_and_nothing_else", (0,), (7,), keys=7),
    Case("behind_prefixes", (1, 12, 5), (7, 7, 7)),
    Case("ragged_with_an_empty_row", (0, 12, 3, 0), (7, 1, 4, 0)),
    Case("one_query", (18, 0, 6), (1, 1, 1), tokens=1),
    Case("one_key", (0, 0), (1, 0), tokens=1, keys=1),
    Case("one_head", (0, 9), (5, 7), heads=1),
    Case("many_heads_narrow_values", (0, 9), (5, 7), heads=8, dim=24, value=16),
    Case("wide_values_odd_sizes", (0, 9), (5, 7), heads=2, dim=5, value=11),
    Case("bf16", (0, 9, 4), (7, 3, 0), dtype="bfloat16"),
    Case("bf16_narrow_values", (11, 0), (7, 7), heads=5, dim=32, value=8, dtype="bfloat16"),
]
# bf16 rounds the weights (half a unit in 2^8 each) and the result; values have deviation 1.
ATOL = {"float32": 2e-6, "bfloat16": 3e-2}


def inputs(case: Case):
    rng = np.random.default_rng(len(case.id))
    rows = len(case.prefixes)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    q = normal(rows, case.tokens, case.heads, case.dim)
    k = normal(rows, case.keys, case.heads, case.dim)
    v = normal(rows, case.keys, case.heads, case.value)
    return q, k, v, jnp.asarray(case.visible)


def attend_float64(q, k, v, visible):
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, h in np.ndindex(q.shape[:3]):
        n = int(visible[b, t])
        if n:
            scores = k[b, :n, h] @ q[b, t, h] * SCALE
            weights = np.exp(scores - scores.max())
            out[b, t, h] = weights @ v[b, :n, h] / weights.sum()
    return out


@pytest.mark.parametrize("budget", [pytest.param(b, id=name) for name, b in BUDGETS.items()])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_parity(case, budget):
    q, k, v, visible = inputs(case)
    out = attend(q, k, v, visible, scale=SCALE, budget=budget)
    assert out.dtype == q.dtype
    assert out.shape == (*q.shape[:3], case.value)
    got = np.asarray(out.astype(jnp.float32))
    assert (got[case.visible == 0] == 0).all()
    for wanted in (
        attend_float64(q, k, v, visible),
        reference.dense_attention(q, k, v, visible, scale=SCALE),
    ):
        np.testing.assert_allclose(got, wanted, atol=ATOL[case.dtype], rtol=0)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
def test_what_is_not_visible_does_not_matter(budget):
    """Bit for bit, however large it is."""
    case = Case("ragged", (0, 12, 3), (7, 1, 4))
    q, k, v, visible = inputs(case)
    behind = np.arange(case.keys) >= case.visible.max(axis=1)[:, None]
    loud = [jnp.where(behind[..., None, None], 1e30, x) for x in (k, v)]
    plain = attend(q, k, v, visible, scale=SCALE, budget=budget)
    assert np.array_equal(plain, attend(q, *loud, visible, scale=SCALE, budget=budget))


@pytest.mark.parametrize("score", [-1e5, 1e5])
def test_extreme_scores_are_scores_and_not_a_mask(score):
    q = jnp.full((1, 1, 1, 1), score)
    k = jnp.array([1.0, 1.0, -1.0]).reshape(1, 3, 1, 1)
    v = jnp.array([2.0, 4.0, 100.0]).reshape(1, 3, 1, 1)
    for n, wanted in ((1, 2.0), (2, 3.0), (3, 3.0 if score > 0 else 100.0)):
        assert attend(q, k, v, jnp.full((1, 1), n, jnp.int32), scale=1.0).item() == wanted


def test_scores_never_exist_whole():
    """Temporary memory follows the budget, not T * S."""
    shape = jax.ShapeDtypeStruct

    def temporary(tokens, budget):
        q, k = (shape((1, n, 4, 8), jnp.float32) for n in (tokens, 2048))
        visible = shape((1, tokens), jnp.int32)
        lowered = attend.lower(q, k, k, visible, scale=SCALE, budget=budget)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    budget, whole = 2**20, 2048 * 2048 * 4 * 4
    assert temporary(2048, budget) < whole / 8
    # Twice the queries add their own inputs and outputs (blocks of them), and no scores.
    assert temporary(4096, budget) - temporary(2048, budget) < 2 * 2048 * 4 * 8 * 4


def test_one_block_has_no_loop():
    q, k, v, visible = inputs(CASES[0])
    lowered = attend.lower(q, k, v, visible, scale=SCALE)
    assert "while" not in lowered.as_text()


def test_implementations():
    q, k, v, visible = inputs(CASES[0])
    best = attend(q, k, v, visible, scale=SCALE)
    assert np.array_equal(best, attend(q, k, v, visible, scale=SCALE, implementation="xla"))
    with pytest.raises(NotImplementedError, match="'triton' does not exist for this op"):
        attend(q, k, v, visible, scale=SCALE, implementation="triton")
    with pytest.raises(ValueError, match="'flash' is not a known name"):
        attend(q, k, v, visible, scale=SCALE, implementation="flash")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there may be cuDNN")
def test_cudnn_is_refused_without_a_gpu():
    q, k, v, visible = inputs(CASES[0])
    with pytest.raises(NotImplementedError, match="cuDNN needs an NVIDIA GPU"):
        attend(q, k, v, visible, scale=SCALE, implementation="cudnn")
