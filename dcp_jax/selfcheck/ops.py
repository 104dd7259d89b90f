"""Areas of the self-check that need one device: every op by itself against its reference.

On lengths at the borders (0, 1, W-1, a page, K-1, K, K+1), with ties, empty shards, and garbage
where nobody may look.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dcp_jax.selfcheck import (
    DCP_SIZES,
    EXACT,
    FLOAT32,
    Outcome,
    compiled,
    distance,
    measure,
    per_implementation,
    unequal,
)
from pallas_kernels import indexer, kv_layout, lse_merge, reference, sparse_mla, topk
from pallas_kernels.dense_attention import dense_attention

LSE = 2e-5
# The inputs are rounded before both sides see them; what differs is how probabilities are rounded.
BFLOAT16 = 1e-2


@dataclass(frozen=True)
class Sizes:
    """Of the arrays: small on CPU; what kernels are made for on an accelerator."""

    heads: int
    index_heads: int
    index_dim: int
    latent: int
    rope: int
    page_size: int
    k: int


SMALL = Sizes(heads=4, index_heads=4, index_dim=16, latent=160, rope=8, page_size=4, k=6)
RELEASED = Sizes(heads=64, index_heads=32, index_dim=128, latent=512, rope=64, page_size=64, k=2048)


def sizes_here() -> Sizes:
    """Sizes for the platform."""
    return SMALL if jax.default_backend() == "cpu" else RELEASED


def merge_checks() -> Iterator[Outcome]:
    """Partial attentions by their LSE: known values, empty partials with NaN inside."""
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((4, 2, 3, 8)).astype(np.float32)
    lses = (4 * rng.standard_normal((4, 2, 3))).astype(np.float32)
    empty = lses.copy()
    empty[1, 0], empty[2, 1], empty[:, 1, 2] = -np.inf, np.inf, -np.inf
    poisoned = np.where(np.isinf(empty)[..., None], np.nan, outs)

    def known(implementation):
        # sum of exponentials 2 and 8, outputs 1 and -1: (2 - 8) / 10
        outs, lses = jnp.array([[[1.0]], [[-1.0]]]), jnp.log(jnp.array([[2.0], [8.0]]))
        got = compiled(lse_merge.merge_partials, outs, lses, implementation=implementation)
        return distance(got, ([[-0.6]], [np.log(10.0)]))

    def case(outs, lses):
        return lambda implementation: distance(
            compiled(lse_merge.merge_partials, outs, lses, implementation=implementation),
            compiled(reference.merge_partials, outs, lses),
        )

    yield from per_implementation(
        "merge",
        "merge_partials",
        {
            "known values": (LSE, known),
            "random": (LSE, case(outs, lses)),
            "empty partials": (LSE, case(poisoned, empty)),
        },
    )
    yield measure(
        "merge",
        "merge_weights",
        LSE,
        lambda: distance(
            np.einsum("wbt,wbtd->btd", compiled(lse_merge.merge_weights, lses), outs),
            compiled(reference.merge_partials, outs, lses)[0],
        ),
    )


def index_checks() -> Iterator[Outcome]:
    """Scores of the lightning indexer, and its best keys, ties included."""
    s, rng = sizes_here(), np.random.default_rng(1)
    pages = max(3, -(-s.k // s.page_size) + 1)
    n_keys = pages * s.page_size
    table = rng.permutation(2 * pages).reshape(2, pages).astype(np.int32)
    ends = [0, 1, s.page_size - 1, s.page_size, s.page_size + 1, s.k - 1, s.k, n_keys]
    lengths = np.array(ends, np.int32).reshape(2, 4)
    q = rng.standard_normal((2, 4, s.index_heads, s.index_dim)).astype(np.float32)
    keys = rng.standard_normal((2 * n_keys, s.index_dim)).astype(np.float32)
    weights = rng.standard_normal(q.shape[:3]).astype(np.float32) / np.float32(s.index_heads)

    def arrays(kind):
        if kind != "e4m3":
            dtype = jnp.dtype(kind)
            return jnp.asarray(q, dtype), jnp.asarray(keys, dtype), None
        (q_bytes, _), pool = (compiled(kv_layout.quantize_index, x) for x in (q, keys))
        return q_bytes, *pool

    def scores(kind):
        def compute(implementation):
            q, pool, scale = arrays(kind)
            args, sizes = (q, weights, pool, scale, table, lengths), {"page_size": s.page_size}
            got = compiled(indexer.index_scores, *args, **sizes, implementation=implementation)
            return distance(got, compiled(reference.index_scores, *args, **sizes))

        return compute

    def best(implementation):
        args = q, weights, np.zeros_like(keys), None, table, lengths
        sizes = {"k": s.k, "page_size": s.page_size}
        found = compiled(indexer.index_topk, *args, **sizes, implementation=implementation)
        equal = np.zeros((2, 4, n_keys), np.float32)
        _, want = compiled(reference.local_topk, equal, lengths, k=s.k)
        return unequal(found.index, want)

    # Products of bfloat16 or e4m3 values are exact in float32: one limit for all.
    cases = {kind: (FLOAT32, scores(kind)) for kind in ("float32", "bfloat16", "e4m3")}
    yield from per_implementation("index", "index_scores", cases)
    yield from per_implementation("index", "index_topk", {"of equal scores": (EXACT, best)})


def topk_checks() -> Iterator[Outcome]:
    """The exact global top-k: local lists, their exchange format and the merge over W ranks."""
    s, rng = sizes_here(), np.random.default_rng(2)
    k, n_keys = s.k, 4 * s.k
    ends = [0, 1, 7, 8, k - 1, k, k + 1, n_keys]
    lengths = np.array(ends, np.int32).reshape(1, -1)
    # Few distinct values, so that every cutoff falls among ties.
    tied = rng.integers(0, 3, (1, len(ends), n_keys)).astype(np.float32)
    tied[0, :, 3::7], tied[0, :, 5::11], tied[0, :, 2::13] = -np.inf, np.nan, -0.0
    plain = rng.standard_normal(tied.shape).astype(np.float32)

    def local(scores, width):
        def compute(implementation):
            args = scores, lengths
            got = compiled(topk.local_topk, *args, k=width, implementation=implementation)
            best, want = compiled(reference.local_topk, *args, k=width)
            exists = np.arange(width) < np.minimum(lengths, n_keys)[..., None]
            keys = np.where(exists, compiled(topk.score_keys, best), topk.PADDING_KEY)
            return unequal(tuple(got), (keys, want))

        return compute

    yield from per_implementation(
        "topk",
        "local_topk",
        {
            "random": (EXACT, local(plain, k)),
            "ties, -inf, NaN": (EXACT, local(tied, k)),
            "k > keys": (EXACT, local(tied, n_keys + 3)),
        },
    )

    def merged(scores, size, sent):
        """Every rank's list through the exchange format, then every rank's merge."""
        shards = np.stack([scores[0, :, rank::size] for rank in range(size)])
        own = [[len(range(rank, n, size)) for n in ends] for rank in range(size)]

        def merge(shards, own, implementation):
            lists = topk.local_topk(shards, own, sent)
            wide, narrow = (
                topk.unpack_candidates(topk.pack_candidates(lists, wide=w), wide=w)
                for w in (True, False)
            )
            found = jax.lax.map(
                lambda rank: topk.merge_candidates(
                    narrow.keys[:, None],
                    narrow.index[:, None],
                    jnp.asarray(lengths),
                    rank,
                    k=k,
                    implementation=implementation,
                ),
                jnp.arange(size, dtype=jnp.int32),
            )
            return lists, wide, narrow, found

        def compute(implementation):
            lists, wide, narrow, (count, certified) = compiled(
                merge, shards, np.array(own, np.int32), implementation=implementation
            )
            want = compiled(reference.merge_counts, scores, lengths, k=k, dcp_size=size)
            wrong = unequal(wide, lists) + unequal(narrow, lists)
            wrong += unequal(np.where(certified, count, want), want)
            return wrong + (0 if sent < k else unequal(certified, np.ones_like(certified)))

        return compute

    def crowded(implementation):
        # Rank 0 sees the k best keys and may send k - 1 of them: nobody can be sure.
        keys = jnp.stack([jnp.arange(2 * k, k + 1, -1), jnp.arange(k, 1, -1)]).astype(jnp.uint32)
        index = jnp.broadcast_to(jnp.arange(k - 1, dtype=jnp.int32), keys.shape)
        found = compiled(
            partial(topk.merge_candidates, k=k, implementation=implementation),
            keys[:, None, None],
            index[:, None, None],
            np.full((1, 1), n_keys, np.int32),
            jnp.int32(0),
        )
        return unequal(found.certified, [[False]])

    cases = {f"W={size}, ties": (EXACT, merged(tied, size, k)) for size in DCP_SIZES}
    for size in (2, 8):
        sent = min(topk.candidate_capacity(k, size), k - 1)
        cases[f"W={size}, pruned"] = (EXACT, merged(plain, size, sent))
    cases["too few sent"] = (EXACT, crowded)
    yield from per_implementation("topk", "merge_candidates", cases)


def attention_checks() -> Iterator[Outcome]:
    """Sparse MLA over selected rows: dtypes, empty queries, garbage, and shards of W ranks."""
    s, rng = sizes_here(), np.random.default_rng(3)
    m = 2 * s.k
    latent = rng.standard_normal((m, s.latent)).astype(np.float32)
    k_pe = rng.standard_normal((m, s.rope)).astype(np.float32)
    counts = np.array([[0, 1, s.k - 1, s.k]], np.int32)
    rows = np.stack([rng.permutation(m - 1)[: s.k] for _ in range(4)])[None].astype(np.int32)
    latent[m - 1] = np.nan  # nobody's row
    rows = np.where(np.arange(s.k) < counts[..., None], rows, m - 1)
    q_latent = rng.standard_normal((1, 4, s.heads, s.latent)).astype(np.float32)
    q_pe = rng.standard_normal((1, 4, s.heads, s.rope)).astype(np.float32)
    scale = (s.latent + s.rope) ** -0.5

    def arrays(kind):
        dtype = jnp.dtype("float32" if kind == "e4m3" else kind)
        pool = sparse_mla.LatentPool(jnp.asarray(latent, dtype), None, jnp.asarray(k_pe, dtype))
        if kind == "e4m3":
            # magnitudes that only the scales carry
            values, scales = compiled(kv_layout.quantize_latent, np.nan_to_num(latent) * 3)
            pool = sparse_mla.LatentPool(values, scales, jnp.asarray(k_pe))
        return jnp.asarray(q_latent, dtype), jnp.asarray(q_pe, dtype), pool

    def case(kind):
        def compute(implementation):
            args = *arrays(kind), rows, counts
            got = compiled(sparse_mla.sparse_mla, *args, scale=scale, implementation=implementation)
            return distance(got, compiled(reference.sparse_mla, *args, scale=scale))

        return compute

    def shards(size):
        def compute(implementation):
            q, pe, pool = arrays("float32")
            attend = jax.jit(
                partial(sparse_mla.sparse_mla, scale=scale, implementation=implementation)
            )
            parts = []
            for rank in range(size):
                own = (rows % size == rank) & (np.arange(s.k) < counts[..., None])
                first = np.take_along_axis(rows, np.argsort(~own, axis=-1, kind="stable"), -1)
                parts.append(attend(q, pe, pool, first, own.sum(-1).astype(np.int32)))
            outs, lses = (np.stack(x) for x in zip(*parts, strict=True))
            want = compiled(reference.sparse_mla, q, pe, pool, rows, counts, scale=scale)
            return distance(compiled(lse_merge.merge_partials, outs, lses), want)

        return compute

    cases = {"float32": (FLOAT32, case("float32")), "bfloat16": (BFLOAT16, case("bfloat16"))}
    cases["e4m3 pool"] = (FLOAT32, case("e4m3"))
    cases |= {f"shards of W={n}": (FLOAT32, shards(n)) for n in DCP_SIZES[1:]}
    yield from per_implementation("attention", "sparse_mla", cases)
    yield from _dense_attention_checks()


def _dense_attention_checks() -> Iterator[Outcome]:
    """Causal rows with and without a prefix, padding queries, large values beyond the visible."""
    s, rng = sizes_here(), np.random.default_rng(4)
    keys, dim, value = 4 * s.page_size, 4 * s.rope, 2 * s.rope
    visible = np.array([[1, 2, 3, 0], [keys - 3, keys - 2, keys - 1, keys]], np.int32)
    q = rng.standard_normal((2, 4, s.heads, dim)).astype(np.float32)
    k = rng.standard_normal((2, keys, s.heads, dim)).astype(np.float32)
    v = rng.standard_normal((2, keys, s.heads, value)).astype(np.float32)
    k[0, 3:], v[0, 3:] = 1e4, 1e4

    def case(kind):
        def compute(implementation):
            args = *(jnp.asarray(x, kind) for x in (q, k, v)), visible
            attend = partial(dense_attention, scale=dim**-0.5, implementation=implementation)
            got = compiled(attend, *args).astype(jnp.float32)
            return distance(got, compiled(reference.dense_attention, *args, scale=dim**-0.5))

        return compute

    cases = {"float32": (FLOAT32, case("float32")), "bfloat16": (BFLOAT16, case("bfloat16"))}
    yield from per_implementation("attention", "dense_attention", cases, ("cudnn", "xla"))
