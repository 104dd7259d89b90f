"""Index scores and their local top-k over a paged, sharded pool."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.indexer import index_scores, index_topk
from pallas_kernels.kv_layout import quantize_index, write_rows
from pallas_kernels.topk import score_keys

M, BASE = 120, 3
STATIC = ("page_size", "budget", "k")
scores_of = jax.jit(index_scores, static_argnames=STATIC[:2])
topk_of = jax.jit(index_topk, static_argnames=STATIC)
naive_scores = jax.jit(reference.index_scores, static_argnames=STATIC[:1])
naive_topk = jax.jit(reference.local_topk, static_argnums=2)
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    id: str
    dtype: str = "float32"
    scaled: bool = False
    batch: int = 2
    tokens: int = 5
    heads: int = 4
    dim: int = 16
    pages: int = 6
    page_size: int = 4
    budgets: tuple[int, ...] = (2**26, 12_000)
    rtol: float = 2e-6


CASES = [
    Case("f32", budgets=(2**26, 12_000, 1)),
    Case("bf16_scaled", "bfloat16", scaled=True),
    Case("e4m3", "uint8", scaled=True, dim=32),
    Case("decode", tokens=1, batch=3),
    Case("odd_sizes", batch=1, tokens=7, heads=3, dim=5, pages=7, page_size=3, budgets=(6000, 1)),
    Case("one_page", pages=1, page_size=20, tokens=3),
]


def make(case, seed=0):
    """Inputs in which every row that isn't visible is poison, -1 pages included."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(100 // case.page_size)[: case.batch * case.pages]
    pages = np.resize(pages, (case.batch, case.pages)).astype(np.int32)
    capacity = case.pages * case.page_size
    lengths = rng.integers(0, capacity + 1, (case.batch, case.tokens)).astype(np.int32)
    lengths[0] = np.resize([capacity, 1, 0, case.page_size, case.page_size + 1], case.tokens)
    if case.batch > 1:
        lengths[1] = np.minimum(lengths[1], capacity - case.page_size)
        pages[1, -1] = -1
    keys = jnp.asarray(rng.standard_normal((M, case.dim)), jnp.float32)
    q = jnp.asarray(
        rng.standard_normal((case.batch, case.tokens, case.heads, case.dim)), jnp.float32
    )
    read = np.zeros(M, bool)
    for b in range(case.batch):
        local = np.arange(lengths[b].max())
        read[BASE + pages[b][local // case.page_size] * case.page_size + local % case.page_size] = (
            True
        )
    if case.dtype == "uint8":
        values, _ = quantize_index(keys)
        keys = jnp.where(read[:, None], values, 0x7F)
        q, _ = quantize_index(q)
    else:
        keys = jnp.where(read[:, None], keys, NAN).astype(case.dtype)
        q = q.astype(case.dtype)
    scale = (
        jnp.asarray(np.where(read, rng.random(M) + 0.5, NAN), jnp.float32) if case.scaled else None
    )
    weights = jnp.asarray(rng.standard_normal((case.batch, case.tokens, case.heads)), jnp.float32)
    return q, weights, keys, scale, jnp.asarray(pages), jnp.asarray(lengths)


def scores_float64(case, q, weights, keys, scale, pages, lengths):
    q, keys = (np.asarray(reference.as_float32(x), np.float64) for x in (q, keys))
    scores = np.full((case.batch, case.tokens, case.pages * case.page_size), -INF)
    for b, t in np.ndindex(scores.shape[:2]):
        for s in range(int(lengths[b, t])):
            row = BASE + int(pages[b, s // case.page_size]) * case.page_size + s % case.page_size
            per_head = np.maximum(q[b, t] @ keys[row], 0)
            scores[b, t, s] = np.asarray(weights[b, t], np.float64) @ per_head
            if scale is not None:
                scores[b, t, s] *= float(scale[row])
    return scores


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_scores_in_every_blocking(case):
    inputs = make(case)
    expected = scores_float64(case, *inputs)
    visible = np.isfinite(expected)
    naive = naive_scores(*inputs, page_size=case.page_size, base_row=BASE)
    assert (np.isfinite(naive) == visible).all()
    tolerance = {"rtol": case.rtol, "atol": 2e-6 * np.abs(expected[visible]).max()}
    np.testing.assert_allclose(naive[visible], expected[visible], **tolerance)
    for budget in case.budgets:
        scores = scores_of(*inputs, page_size=case.page_size, base_row=BASE, budget=budget)
        assert scores.dtype == jnp.float32
        assert (np.isneginf(np.asarray(scores)) == ~visible).all()
        np.testing.assert_allclose(scores[visible], expected[visible], **tolerance)


@pytest.mark.parametrize(("name", "k"), [("f32", 3), ("e4m3", 3), ("decode", 40), ("odd_sizes", 5)])
def test_topk_in_every_blocking(name, k):
    (case,) = (c for c in CASES if c.id == name)
    inputs = make(case, seed=1)
    scores = naive_scores(*inputs, page_size=case.page_size, base_row=BASE)
    best, index = naive_topk(scores, inputs[-1], k)
    for budget in case.budgets:
        got = topk_of(*inputs, k=k, page_size=case.page_size, base_row=BASE, budget=budget)
        exists = np.arange(k) < np.asarray(inputs[-1])[..., None]
        assert (np.asarray(got.keys != 0) == exists).all()
        assert (got.index == index).all()
        got_keys, best_keys = (np.asarray(x).astype(np.int64) for x in (got.keys, score_keys(best)))
        assert np.all(np.abs(got_keys - best_keys)[exists] < 64)  # units in the last place


def test_fp8_scores_of_the_reference(golden_quant):
    page = np.zeros((64, 128), np.uint8)
    scale = np.zeros(64, np.float32)
    page[:40], scale[:40] = golden_quant["idx_k_fp8"], golden_quant["idx_k_scale"][:, 0]
    weights = (
        golden_quant["idx_weights_f32"] * golden_quant["idx_q_scale"][..., 0] * (8 * 128) ** -0.5
    )
    scores = index_scores(
        jnp.asarray(golden_quant["idx_q_fp8"])[None],
        jnp.asarray(weights, jnp.float32)[None],
        jnp.asarray(page),
        jnp.asarray(scale),
        jnp.zeros((1, 1), jnp.int32),
        jnp.full((1, 40), 40, jnp.int32),
        page_size=64,
    )
    np.testing.assert_allclose(scores[0, :, :40], golden_quant["idx_score_fp8"], atol=2e-7)
    assert np.isneginf(np.asarray(scores[0, :, 40:])).all()


def test_a_visible_nan_key_counts_as_minus_inf_and_is_still_visible():
    case = Case("nan", batch=1, tokens=1)
    q, weights, keys, scale, pages, lengths = make(case)
    lengths = jnp.full((1, 1), 5, jnp.int32)
    keys = keys.at[BASE + int(pages[0, 0]) * 4 + 2].set(NAN)
    got = topk_of(q, weights, keys, scale, pages, lengths, k=8, page_size=4, base_row=BASE)
    assert got.index[0, 0, 4] == 2
    assert got.keys[0, 0, 4] == score_keys(jnp.array([-INF]))[0]
    assert (got.keys[0, 0, 5:] == 0).all()


def test_closed_relus_tie_and_the_lowest_index_wins():
    q = -jnp.ones((1, 1, 4, 8))
    keys = jnp.ones((16, 8))
    got = index_topk(
        q,
        jnp.ones((1, 1, 4)),
        keys,
        None,
        jnp.array([[1, 0]], jnp.int32),
        jnp.full((1, 1), 15, jnp.int32),
        6,
        page_size=8,
    )
    assert got.index[0, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dcp_size", [1, 2, 3, 8])
def test_written_by_position_and_read_back_on_every_rank(dcp_size):
    """Row arithmetic written out here once more, so that write and read can't share a mistake."""
    n, page_size, dim, heads = 45, 4, 16, 2
    rng = np.random.default_rng(dcp_size)
    keys = rng.standard_normal((n, dim)).astype(np.float32)
    q = jnp.asarray(rng.standard_normal((1, 1, heads, dim)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((1, 1, heads)), jnp.float32)
    n_pages = -(-n // (page_size * dcp_size))
    table = rng.permutation(n_pages + 3)[:n_pages].astype(np.int32)
    rows_total = (n_pages + 3) * page_size
    exact = np.maximum(np.asarray(q[0, 0], np.float64) @ keys.T.astype(np.float64), 0)
    exact = np.asarray(weights[0, 0], np.float64) @ exact
    for rank in range(dcp_size):
        rows = np.full(n, rows_total, np.int32)
        for p in range(rank, n, dcp_size):
            local = p // dcp_size
            rows[p] = table[local // page_size] * page_size + local % page_size
        pool = write_rows(jnp.full((rows_total, dim), NAN), jnp.asarray(keys), jnp.asarray(rows))
        length = len(range(rank, n, dcp_size))
        scores = index_scores(
            q,
            weights,
            pool,
            None,
            jnp.asarray(table)[None],
            jnp.full((1, 1), length, jnp.int32),
            page_size=page_size,
        )
        np.testing.assert_allclose(scores[0, 0, :length], exact[rank::dcp_size], atol=1e-5)
        assert np.isneginf(np.asarray(scores[0, 0, length:])).all()


def test_131072_keys_and_32_heads_in_chunks_and_at_once():
    """A sum over heads that silently becomes zero past 128K keys selects the last 2048 tokens."""
    n, heads, dim = 131_072, 32, 8
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.standard_normal((n, dim)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((1, 1, heads, dim)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((1, 1, heads)), jnp.float32)
    table, lengths = jnp.arange(n // 64, dtype=jnp.int32)[None], jnp.full((1, 1), n - 5, jnp.int32)
    inputs = q, weights, keys, None, table, lengths
    exact = np.maximum(np.asarray(q[0, 0]) @ np.asarray(keys).T, 0).T @ np.asarray(weights[0, 0])
    for budget in (2**26, 2**19):
        scores = np.asarray(index_scores(*inputs, page_size=64, budget=budget))[0, 0]
        assert len(np.unique(scores[: n - 5])) > 50_000
        np.testing.assert_allclose(scores[: n - 5], exact[: n - 5], atol=1e-4)
        assert np.isneginf(scores[n - 5 :]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_a_32k_prompt_never_builds_scores_of_all_heads(dtype):
    tokens, n, heads, dim = 512, 32_768, 32, 128
    shape = jax.ShapeDtypeStruct

    def temporary(rows):
        compiled = (
            jax.jit(partial(index_topk, k=2048, page_size=64))
            .lower(
                shape((1, tokens, heads, dim), dtype),
                shape((1, tokens, heads), jnp.float32),
                shape((rows, dim), dtype),
                shape((rows,), jnp.float32),
                shape((1, n // 64), jnp.int32),
                shape((1, tokens), jnp.int32),
            )
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert 16 * temporary(n) < tokens * n * heads * 4 == 2**31
    assert temporary(n) == temporary(8 * n)  # the pool is neither copied nor converted


def test_decode_has_no_loop_and_mixed_formats_are_refused():
    case = Case("decode", tokens=1)
    q, weights, keys, scale, pages, lengths = make(case)
    call = jax.jit(partial(index_topk, k=4, page_size=case.page_size))
    assert "stablehlo.while" not in call.lower(q, weights, keys, scale, pages, lengths).as_text()
    with pytest.raises(ValueError, match="quantise both or neither"):
        index_scores(q, weights, keys.astype(jnp.uint8), scale, pages, lengths, page_size=4)
