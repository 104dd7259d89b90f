"""Sparse MLA over owned rows: parity with the reference and with float64, whatever stands in
unread memory.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.kv_layout import quantize_latent
from pallas_kernels.lse_merge import merge_partials
from pallas_kernels.sparse_mla import LatentPool, sparse_mla

M, BASE = 60, 7
attend = jax.jit(sparse_mla, static_argnames=("scale", "budget"))
naive = jax.jit(reference.sparse_mla, static_argnames="scale")
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    id: str
    query: str = "float32"
    cache: str = "float32"
    heads: int = 3
    rank: int = 24
    rope: int = 8
    atol: float = 5e-6
    lse_atol: float = 5e-6


CASES = [
    Case("f32"),
    Case("bf16", "bfloat16", "bfloat16", atol=2e-2, lse_atol=1e-3),
    Case("f32_query_bf16_cache", "float32", "bfloat16"),
    Case("e4m3_f32_query", "float32", "uint8", rank=136),
    Case("e4m3_bf16_query", "bfloat16", "uint8", rank=256, rope=16, atol=4e-2, lse_atol=4e-2),
    Case("one_head_odd_sizes", heads=1, rank=5, rope=3),
]


def make(case, seed=0, batch=2, tokens=5, k=9):
    """Inputs whose unread rows and whose row ids past the counts are poison."""
    rng = np.random.default_rng(seed)
    rows = np.stack([1 + rng.permutation(39)[:k] for _ in range(batch * tokens)]).reshape(
        batch, tokens, k
    )
    counts = rng.integers(0, k + 1, (batch, tokens))
    counts[0, : min(tokens, 3)] = (0, 1, k)[:tokens]
    exists = np.arange(k) < counts[..., None]
    read = np.zeros(M, bool)
    read[rows[exists] + BASE] = True
    latent = jnp.asarray(rng.standard_normal((M, case.rank)), jnp.float32)
    k_pe = jnp.asarray(np.where(read[:, None], rng.standard_normal((M, case.rope)), NAN))
    if case.cache == "uint8":
        values, scale = quantize_latent(latent)
        pool = LatentPool(
            jnp.where(read[:, None], values, 0x7F),
            jnp.where(read[:, None], scale, NAN),
            k_pe.astype(jnp.bfloat16),
        )
    else:
        latent = jnp.where(read[:, None], latent, NAN)
        pool = LatentPool(latent.astype(case.cache), None, k_pe.astype(case.cache))
    garbage = rng.choice([-1, -(2**31), 2**31 - 1 - BASE, 0, 39, 10**9], rows.shape)
    q_latent = jnp.asarray(rng.standard_normal((batch, tokens, case.heads, case.rank)), case.query)
    q_pe = jnp.asarray(rng.standard_normal((batch, tokens, case.heads, case.rope)), case.query)
    return (
        q_latent,
        q_pe,
        pool,
        jnp.asarray(np.where(exists, rows, garbage), jnp.int32),
        jnp.asarray(counts, jnp.int32),
    )


def attend_float64(q_latent, q_pe, pool, rows, counts, scale):
    latent = np.asarray(reference.as_float32(pool.latent, pool.scale), np.float64)
    k_pe, q_latent, q_pe = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (pool.k_pe, q_latent, q_pe)
    )
    out, lse = np.zeros(q_latent.shape), np.full(q_latent.shape[:3], -INF)
    for b, t in np.ndindex(counts.shape):
        mine = np.asarray(rows[b, t, : counts[b, t]]) + BASE
        if len(mine):
            s = (q_latent[b, t] @ latent[mine].T + q_pe[b, t] @ k_pe[mine].T) * scale
            lse[b, t] = np.log(np.exp(s).sum(axis=-1))
            out[b, t] = np.exp(s - lse[b, t][:, None]) @ latent[mine]
    return out, lse


@pytest.mark.parametrize("budget", [2**26, 12_000], ids=["one_block", "blocks"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_parity(case, budget):
    inputs = make(case)
    out, lse = attend(*inputs, scale=0.3, base_row=BASE, budget=budget)
    assert out.dtype == lse.dtype == jnp.float32
    expected = attend_float64(*inputs, 0.3)
    for want_out, want_lse in (expected, naive(*inputs, scale=0.3, base_row=BASE)):
        empty = np.broadcast_to(np.asarray(inputs[4])[..., None] == 0, lse.shape)
        assert (np.isneginf(np.asarray(lse)) == empty).all()
        assert (np.isneginf(np.asarray(want_lse)) == empty).all()
        assert (np.asarray(out)[empty] == 0).all()
        np.testing.assert_allclose(out, want_out, atol=case.atol)
        np.testing.assert_allclose(lse[~empty], want_lse[~empty], atol=case.lse_atol)


@pytest.mark.parametrize("score", [-1e5, -5.2e5, 5.2e5])
def test_extreme_scores_are_scores_and_not_a_mask(score):
    """One row far below any finite sentinel is the whole softmax, also in a merge with nothing."""
    pool = LatentPool(jnp.array([[1.0, 0.5], [NAN, NAN]]), None, jnp.zeros((2, 2)))
    q_latent = jnp.array([score, 0.0]).reshape(1, 1, 1, 2)
    rows = jnp.array([[[0, 1]]], jnp.int32)
    out, lse = sparse_mla(
        q_latent, jnp.zeros((1, 1, 1, 2)), pool, rows, jnp.ones((1, 1), jnp.int32), scale=1.0
    )
    assert out[0, 0, 0].tolist() == [1.0, 0.5]
    assert lse[0, 0, 0] == score
    none, nothing = sparse_mla(
        q_latent, jnp.zeros((1, 1, 1, 2)), pool, rows, jnp.zeros((1, 1), jnp.int32), scale=1.0
    )
    assert none.tolist() == [[[[0.0, 0.0]]]]
    assert nothing.tolist() == [[[-INF]]]
    merged, merged_lse = merge_partials(jnp.stack([none * NAN, out]), jnp.stack([nothing, lse]))
    assert np.array_equal(merged, out)
    assert np.array_equal(merged_lse, lse)


def test_valid_looking_ids_past_the_count_are_ignored():
    """At 70 query tokens: a kernel that reads past the length is right only for the first tile."""
    case = Case("many_tokens")
    q_latent, q_pe, pool, rows, counts = make(case, tokens=70, k=9)
    pool = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 3.0, x), pool)
    exists = np.arange(9) < np.asarray(counts)[..., None]
    results = [
        attend(
            q_latent, q_pe, pool, jnp.where(exists, rows, tail), counts, scale=0.3, base_row=BASE
        )
        for tail in (0, -1, 33)
    ]
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_lse_does_not_depend_on_a_constant_in_the_cache_scale():
    q_latent, q_pe, pool, rows, counts = make(Case("e4m3", cache="uint8", rank=128))
    pool = LatentPool(pool.latent, jnp.where(jnp.isnan(pool.scale), NAN, 0.25), pool.k_pe)
    doubled = LatentPool(pool.latent, pool.scale * 2, pool.k_pe)
    out, lse = attend(q_latent, q_pe, pool, rows, counts, scale=0.3, base_row=BASE)
    out2, lse2 = attend(q_latent / 2, q_pe, doubled, rows, counts, scale=0.3, base_row=BASE)
    np.testing.assert_allclose(lse2, lse, atol=1e-5)
    np.testing.assert_allclose(out2, 2 * out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_ranks", [3, 8])
def test_shards_merge_to_the_whole(n_ranks):
    """Short rows too, so that most ranks own nothing and return (0, -inf)."""
    q_latent, q_pe, pool, rows, counts = make(Case("whole"))
    counts = jnp.asarray(np.resize([1, 2, 3, 7, 8, 9], counts.shape), jnp.int32)
    pool = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 1.0, x), pool)
    rows = jnp.clip(rows, 0, 39)
    whole = attend(q_latent, q_pe, pool, rows, counts, scale=0.3, base_row=BASE)
    parts = []
    for r in range(n_ranks):
        mine = rows[..., r::n_ranks]
        n = jnp.maximum((counts - r + n_ranks - 1) // n_ranks, 0)
        parts.append(attend(q_latent, q_pe, pool, mine, n, scale=0.3, base_row=BASE))
    out, lse = merge_partials(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    np.testing.assert_allclose(out, whole[0], atol=2e-6)
    np.testing.assert_allclose(lse, whole[1], atol=2e-6)


def test_no_rows_at_all():
    case = Case("empty")
    q_latent, q_pe, pool, _, counts = make(case)
    out, lse = sparse_mla(q_latent, q_pe, pool, jnp.zeros((2, 5, 0), jnp.int32), counts, scale=0.3)
    assert not np.any(out)
    assert np.isneginf(np.asarray(lse)).all()


def test_rows_far_into_a_large_pool_and_no_copy_of_it():
    """Row 4,000,000 x 576: as a flat int32 element index it would wrap to -1,990,967,296."""
    shape = jax.ShapeDtypeStruct

    def temporary(rows):
        pool = LatentPool(
            shape((rows, 512), jnp.uint8),
            shape((rows, 4), jnp.float32),
            shape((rows, 64), jnp.bfloat16),
        )
        q = shape((1, 1, 8, 512), jnp.bfloat16), shape((1, 1, 8, 64), jnp.bfloat16)
        ids = shape((1, 1, 32), jnp.int32), shape((1, 1), jnp.int32)
        compiled = jax.jit(partial(sparse_mla, scale=0.1)).lower(*q, pool, *ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(1000) == temporary(4_500_000)
    pool = LatentPool(
        jnp.zeros((4_000_002, 2)).at[4_000_001].set(3.0), None, jnp.zeros((4_000_002, 1))
    )
    rows = jnp.full((1, 1, 1), 4_000_000, jnp.int32)
    out, _ = sparse_mla(
        jnp.ones((1, 1, 1, 2)),
        jnp.ones((1, 1, 1, 1)),
        pool,
        rows,
        jnp.ones((1, 1), jnp.int32),
        scale=1.0,
        base_row=1,
    )
    assert out[0, 0, 0].tolist() == [3.0, 3.0]


def test_decode_has_no_loop_and_mismatched_scales_are_refused():
    case = Case("decode")
    q_latent, q_pe, pool, rows, counts = make(case, tokens=1)
    lowered = jax.jit(partial(sparse_mla, scale=0.3)).lower(q_latent, q_pe, pool, rows, counts)
    assert "while" not in lowered.as_text()
    with pytest.raises(ValueError, match="e4m3 bytes need scales"):
        sparse_mla(
            q_latent,
            q_pe,
            pool._replace(latent=pool.latent.astype(jnp.uint8)),
            rows,
            counts,
            scale=1.0,
        )
