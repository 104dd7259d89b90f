"""The model without an engine: the golden logits, and derivatives that agree on every mesh."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcp_jax as dj
from dcp_jax.testing.checkpoints import write_random_checkpoint
from dcp_jax.testing.harness import tiny_config

PAGE_SIZE = 4


def open_model(path, tp: int, dcp_size: int, dtype: str = "float32"):
    cfg = dj.ModelConfig.from_hf(path)
    model = dj.Model(cfg, dj.make_mesh(tp, dcp_size), jnp.dtype(dtype))
    params = dj.load_params(path, model)
    spec, cache = dj.init_cache(model, tokens=128, page_size=PAGE_SIZE)
    return model, params, spec, cache


def batch_of(ids, dcp_size: int) -> dj.Batch:
    pages = -(-len(ids) // (PAGE_SIZE * dcp_size))
    one = partial(np.full, 1, dtype=np.int32)
    table = np.arange(pages, dtype=np.int32)[None]
    return dj.Batch(np.asarray([ids], np.int32), one(fill_value=0), one(fill_value=len(ids)), table)


def test_forward_gives_the_reference_logits(golden):
    p1 = golden("p1")
    model, params, spec, cache = open_model(p1.path, 2, 2)
    opts = dj.StepOptions(PAGE_SIZE, logits="all")
    step = jax.jit(partial(dj.forward, model, spec=spec, opts=opts), donate_argnums=1)
    out, cache = step(params, cache, batch_of(p1.arrays["input_ids"][0].tolist(), 2))
    got = np.asarray(out.logits)[..., : model.cfg.vocab_size]
    np.testing.assert_allclose(got, p1.arrays["logits"], atol=2e-4, rtol=0)
    assert out.certified.all()


@dataclass(frozen=True)
class Case:
    tp: int
    dcp: int
    path: dj.PrefillPath
    dcp_comm: Any

    @property
    def id(self) -> str:
        return f"tp{self.tp}-dcp{self.dcp}-{self.path.value}-{self.dcp_comm}"


OWNED, GATHERED = dj.PrefillPath.OWNED, dj.PrefillPath.GATHERED
CASES = [Case(2, 2, OWNED, "a2a"), Case(4, 2, OWNED, "ag_rs"), Case(3, 3, GATHERED, "a2a")]


def gradient(path, case: Case, ids):
    """Loss and its gradient: the mean log-probability of a prompt's own tokens."""
    model, params, spec, cache = open_model(path, case.tp, case.dcp)
    opts = dj.StepOptions(
        PAGE_SIZE, path=case.path, dcp_comm=case.dcp_comm, logits="all", candidates="full"
    )
    targets = jnp.asarray(ids[1:])

    @jax.jit
    def loss(params):
        out, _ = dj.forward(model, params, cache, batch_of(ids, case.dcp), spec=spec, opts=opts)
        logprobs = jax.nn.log_softmax(out.logits[0, :-1, : model.cfg.vocab_size])
        return logprobs[jnp.arange(len(ids) - 1), targets].mean()

    return jax.jit(jax.value_and_grad(loss))(params), loss, params


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Below index_topk, where sparse attention is dense attention; no router, which has jumps."""
    config = tiny_config(index_topk=16, num_hidden_layers=2, num_attention_heads=4)
    config |= {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "dense"]}
    path = write_random_checkpoint(tmp_path_factory.mktemp("dense"), config)
    return path, np.random.default_rng(0).integers(2, 64, 12).tolist()


@pytest.fixture(scope="module")
def one_rank(short):
    return gradient(short[0], Case(1, 1, OWNED, "a2a"), short[1])


def test_the_gradient_is_the_slope_of_the_loss(one_rank):
    (_, grads), loss, params = one_rank
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype), params)
    ahead, behind = (
        loss(jax.tree.map(lambda w, d, h=h: w + h * d, params, direction)) for h in (1e-3, -1e-3)
    )
    products = jax.tree.map(lambda g, d: (g * d).sum(), grads, direction)
    assert float(ahead - behind) / 2e-3 == pytest.approx(
        float(sum(jax.tree.leaves(products))), rel=0.02
    )
    attention = grads["layers"]["1"]["attn"]
    assert all(float(jnp.abs(attention[w]).max()) > 0 for w in ("q_b_proj", "w_uk", "w_uv"))
    indexer = grads["layers"]["0"]["attn"]["indexer"]
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(indexer))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_ranks_share_one_gradient(case, short, one_rank):
    """Every parameter's, whatever the mesh, path and exchange; padding has none of it."""
    path, ids = short
    (loss, grads), *_ = gradient(path, case, ids)
    (want_loss, want), *_ = one_rank
    assert float(loss) == pytest.approx(float(want_loss), abs=1e-5)
    for (name, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want), strict=True
    ):
        real = np.asarray(got)[tuple(slice(0, n) for n in expected.shape)]
        scale = max(float(jnp.abs(expected).max()), 1e-3)
        np.testing.assert_allclose(real, expected, atol=1e-4 * scale, rtol=0, err_msg=str(name))


def test_bits_have_no_derivative(short):
    path, ids = short
    model, params, spec, cache = open_model(path, 2, 2, "bfloat16")
    opts = dj.StepOptions(PAGE_SIZE, logits="all")

    def loss(params):
        out, _ = dj.forward(model, params, cache, batch_of(ids, 2), spec=spec, opts=opts)
        return out.logits[0, :, 0].sum()

    with pytest.raises(NotImplementedError, match="dcp_comm='ag_rs'"):
        jax.make_jaxpr(jax.grad(loss))(params)
