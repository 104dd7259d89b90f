"""The ops together inside a shard_map, in blocks: selection and attention as on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import reference
from pallas_kernels.indexer import index_topk
from pallas_kernels.lse_merge import merge_partials
from pallas_kernels.sparse_mla import LatentPool, sparse_mla
from pallas_kernels.topk import merge_candidates

PAGE_SIZE, K, N_KEYS = 4, 6, 40


@pytest.mark.parametrize("budget", [2**26, 1], ids=["one_block", "smallest_blocks"])
@pytest.mark.parametrize("dcp_size", [2, 3, 8])
def test_select_and_attend(dcp_size, budget):
    """Causal queries at the last 6 of 40 positions, one sequence; each rank owns every W-th key."""
    rng = np.random.default_rng(dcp_size)
    tokens, heads, dim, rank_dim, rope = 6, 2, 8, 12, 4
    q = jnp.asarray(rng.standard_normal((1, tokens, heads, dim)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((1, tokens, heads)), jnp.float32)
    q_latent = jnp.asarray(rng.standard_normal((1, tokens, heads, rank_dim)), jnp.float32)
    q_pe = jnp.asarray(rng.standard_normal((1, tokens, heads, rope)), jnp.float32)
    n_visible = jnp.arange(N_KEYS - tokens + 1, N_KEYS + 1, dtype=jnp.int32)[None]

    pages = -(-N_KEYS // (PAGE_SIZE * dcp_size))
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    rows = pages * PAGE_SIZE * dcp_size
    by_position = [rng.standard_normal((rows, d)).astype(np.float32) for d in (dim, rank_dim, rope)]
    by_rank = [np.stack([x[r::dcp_size] for r in range(dcp_size)]) for x in by_position]

    mesh = Mesh(jax.devices()[:dcp_size], "dcp")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("dcp"), P()), out_specs=P("dcp"))
    def step(shards, replicated):
        index_k, latent, k_pe = (x[0] for x in shards)
        q, weights, q_latent, q_pe, table, n_visible = replicated
        rank = jax.lax.axis_index("dcp")
        lengths = (n_visible - rank + dcp_size - 1) // dcp_size
        own = index_topk(
            q, weights, index_k, None, table, lengths, K, page_size=PAGE_SIZE, budget=budget
        )
        keys, index = (jax.lax.all_gather(x, "dcp") for x in own)
        merge = merge_candidates(keys, index, n_visible, rank, k=K, budget=budget)
        part = sparse_mla(
            q_latent,
            q_pe,
            LatentPool(latent, None, k_pe),
            own.index,  # pages are in order here, so a local index is a row
            merge.count,
            scale=0.5,
            budget=budget,
        )
        merged = merge_partials(*(jax.lax.all_gather(x, "dcp") for x in part))
        return jax.tree.map(lambda x: x[None], (own.index, merge, merged))

    shards = jax.device_put(by_rank, NamedSharding(mesh, P("dcp")))
    replicated = jax.device_put(
        (q, weights, q_latent, q_pe, table, n_visible), NamedSharding(mesh, P())
    )
    index, merge, (out, lse) = jax.tree.map(np.asarray, step(shards, replicated))

    scores = reference.index_scores(
        q,
        weights,
        jnp.asarray(by_position[0]),
        None,
        jnp.zeros((1, 1), jnp.int32),
        n_visible,
        page_size=rows,
    )
    mask = np.asarray(reference.selected_positions(scores, n_visible, K))
    assert merge.certified.all()
    for t in range(tokens):
        chosen = [
            int(j) * dcp_size + r
            for r in range(dcp_size)
            for j in index[r, 0, t, : merge.count[r, 0, t]]
        ]
        assert sorted(chosen) == np.flatnonzero(mask[0, t]).tolist()
    positions = jnp.asarray([[np.flatnonzero(mask[0, t]) for t in range(tokens)]], jnp.int32)
    pool = LatentPool(jnp.asarray(by_position[1]), None, jnp.asarray(by_position[2]))
    counts = jnp.full((1, tokens), K, jnp.int32)
    want_out, want_lse = reference.sparse_mla(q_latent, q_pe, pool, positions, counts, scale=0.5)
    for r in range(dcp_size):
        assert np.array_equal(out[r], out[0])
        assert np.array_equal(lse[r], lse[0])
    np.testing.assert_allclose(out[0], want_out, atol=5e-6)
    np.testing.assert_allclose(lse[0], want_lse, atol=5e-6)
