"""`plan` against what runs: allocated arrays, parameters, traced exchanges, compiled memory."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dcp_jax.cache.pool import CacheSpec, init_cache
from dcp_jax.config import ModelConfig
from dcp_jax.configs import NAMES, named_config
from dcp_jax.dcp.step import Batch, StepOptions
from dcp_jax.dcp.traffic import collectives, received_by_kind
from dcp_jax.engine.sampler import sample_step
from dcp_jax.engine.served import SAMPLER_OPTIONS
from dcp_jax.engine.slots import fresh_slots, sampling_batch
from dcp_jax.mesh import TP, make_mesh
from dcp_jax.model import Model
from dcp_jax.plan import (
    CacheBytes,
    Layout,
    StepShape,
    candidates,
    exchange_bytes,
    parameters,
    pool_of,
    weight_bytes,
    workspace,
)
from dcp_jax.plan.exchange import MAX_NARROW_KEYS
from dcp_jax.plan.limits import Deployment
from dcp_jax.plan.workspace import BUDGET
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import tiny_config
from pallas_kernels import blocking, topk


def tiny(**changes) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config(**changes))


def abstract_params(model: Model) -> dict:
    def array(d):
        return jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=NamedSharding(model.mesh, d.spec))

    return jax.tree.map(array, model.param_defs, is_leaf=lambda d: hasattr(d, "spec"))


def test_constants_are_those_of_the_kernels():
    assert BUDGET == blocking.BUDGET_BYTES
    assert MAX_NARROW_KEYS == topk.MAX_NARROW_KEYS
    for k in (1, 8, 64, 2048):
        for w in (1, 2, 3, 4, 8, 64):
            assert candidates(k, w) == topk.candidate_capacity(k, w)


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4])
def test_cache_bytes_are_those_allocated(dcp_size, kv_dtype, replicated):
    cfg = tiny(kv_lora_rank=144, num_nextn_predict_layers=1)  # two scales a latent, one ragged
    layout = Layout(
        tp=dcp_size,
        dcp_size=dcp_size,
        page_size=4,
        kv_dtype=kv_dtype,
        index_replicated=replicated,
        with_mtp=True,
    )
    spec = CacheSpec.of(
        cfg,
        with_mtp=True,
        pages=5,
        page_size=4,
        dcp_size=dcp_size,
        kv_dtype=kv_dtype,
        index_replicated=replicated,
    )
    cache = init_cache(spec, make_mesh(dcp_size, dcp_size))
    held = {"latent": 0, "index_k": 0}
    for name, array in vars(cache).items():
        if array is not None:
            local = array.addressable_shards[-1].data
            held["index_k" if name.startswith("index") else "latent"] += local.nbytes
    pool = pool_of(cfg, layout, 5)
    assert pool.rank_bytes == held == spec.rank_bytes()
    assert (pool.tokens, pool.rank_tokens) == (spec.tokens, spec.rows)
    per_token = CacheBytes.of(cfg, layout).rank_bytes(dcp_size, replicated)
    assert pool.tokens * per_token == pytest.approx(sum(held.values()), rel=1e-12)


@dataclass(frozen=True)
class Held:
    """A model whose parameters are counted."""

    id: str
    config: dict[str, Any]
    tp: int = 1
    dcp_size: int = 1
    weights: str = "bfloat16"
    with_mtp: bool = False


HELD = [
    *(Held(name, named_config(name), 8, 4, with_mtp=True) for name in (NAMES[0], NAMES[2])),
    Held("padded", tiny_config(num_attention_heads=5, vocab_size=67), 3, 3, "float32"),
    Held("no-mtp", tiny_config(), 4, 2, "float32"),
    Held("all-dense", tiny_config(mlp_layer_types=["dense"] * 3), 2),
    Held("two-shared-experts", tiny_config(n_shared_experts=2), 8, 8, "float32"),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in HELD])
def test_weights_are_the_models_parameters(case):
    cfg = ModelConfig.from_hf(case.config)
    layout = Layout(
        tp=case.tp, dcp_size=case.dcp_size, weights=case.weights, with_mtp=case.with_mtp
    )
    model = Model(cfg, make_mesh(case.tp, case.dcp_size), jnp.dtype(case.weights), case.with_mtp)
    leaves = jax.tree_util.tree_flatten_with_path(
        model.param_defs, is_leaf=lambda d: hasattr(d, "spec")
    )[0]
    real = {"/".join(key.key for key in path): leaf for path, leaf in leaves}
    planned = {weight.path: weight for weight in parameters(cfg, layout)}
    assert set(real) == set(planned)
    total = 0
    for path, leaf in real.items():
        weight = planned[path]
        assert weight.shape == leaf.shape, path
        assert weight.sharded == (TP in leaf.spec), path
        assert (weight.kind == "float32") == (leaf.dtype == jnp.float32) or (
            case.weights == "float32"
        ), path
        ranks = case.tp if weight.sharded else 1
        total += math.prod(leaf.shape) // ranks * leaf.dtype.itemsize
    assert sum(weight_bytes(cfg, layout).values()) == total


def test_fp8_weights_have_a_scale_per_block():
    cfg = ModelConfig.from_hf(named_config("glm-5.2"))
    half = weight_bytes(cfg, Layout(tp=8, weights="bfloat16"))
    fp8 = weight_bytes(cfg, Layout(tp=8, weights="fp8"))
    assert fp8["router"] == half["router"]
    assert fp8["head"] == half["head"]
    assert fp8["experts"] == half["experts"] // 2 * (1 + 4 / 128**2)


@dataclass(frozen=True)
class Traffic:
    """A step whose exchanges are read from its program."""

    id: str
    tp: int
    dcp_size: int
    rows: int = 4
    tokens: int = 1
    pages: int = 8
    dtype: str = "float32"
    kv_dtype: str = "float32"
    path: PrefillPath = PrefillPath.OWNED
    options: dict[str, Any] = field(default_factory=dict)


TRAFFIC = [
    Traffic("decode-W2", 2, 2),
    Traffic("decode-W4", 4, 4, dtype="bfloat16", kv_dtype="fp8_e4m3"),
    Traffic("decode-W2-of-4", 4, 2, rows=1),
    Traffic("decode-W3", 3, 3, rows=2),
    Traffic("ag_rs", 4, 4, options={"dcp_comm": "ag_rs"}),
    Traffic("replicated", 2, 2, options={"index_cache": "replicated"}),
    Traffic("full", 4, 4, options={"candidates": "full"}),
    Traffic("few-keys", 4, 4, pages=1),
    Traffic("wide", 2, 2, rows=1, pages=2**15),
    Traffic("tp-only", 4, 1),
    Traffic("one", 1, 1),
    Traffic("prefill-owned", 4, 4, rows=1, tokens=16),
    Traffic("prefill-gathered", 4, 4, rows=1, tokens=16, path=PrefillPath.GATHERED),
    Traffic(
        *("gathered-chunks", 2, 2, 2, 16, 7),
        kv_dtype="fp8_e4m3",
        path=PrefillPath.GATHERED,
        options={"gather_chunk_tokens": 24},
    ),
    Traffic(
        *("gathered-replicated", 2, 2, 1, 16),
        path=PrefillPath.GATHERED,
        options={"index_cache": "replicated"},
    ),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in TRAFFIC])
def test_exchanges_are_those_of_the_program(case):
    # Large enough for pruned candidates to be fewer than index_topk.
    cfg = tiny(
        num_hidden_layers=2,
        indexer_types=["full", "shared"],
        mlp_layer_types=["dense", "sparse"],
        index_topk=256 if case.id.startswith("decode") else 8,
    )
    replicated = case.options.get("index_cache") == "replicated"
    layout = Layout(
        tp=case.tp,
        dcp_size=case.dcp_size,
        page_size=4,
        weights=case.dtype,
        kv_dtype=case.kv_dtype,
        index_replicated=replicated,
        dcp_comm=case.options.get("dcp_comm", "a2a"),
    )
    shape = StepShape(
        *(case.rows, case.tokens, case.pages, case.path),
        candidates=case.options.get("candidates", "pruned"),
        gather_chunk_tokens=case.options.get("gather_chunk_tokens", 32768),
    )
    program, mesh = traced(cfg, layout, shape, case.options)
    found = received_by_kind(list(collectives(program.jaxpr, dict(mesh.shape))))
    assert exchange_bytes(cfg, layout, shape) == found


@pytest.mark.parametrize(("tp", "dcp_size", "rows"), [(1, 1, 4), (4, 2, 4), (3, 3, 16)])
def test_drawing_gathers_the_logits_that_plan_counts(tp, dcp_size, rows):
    """vocab 65 on 3 or 4 ranks is padded; one rank gathers nothing."""
    cfg, mesh = tiny(vocab_size=65), make_mesh(tp, dcp_size)
    layout = Layout(tp=tp, dcp_size=dcp_size, page_size=4, weights="float32", kv_dtype="float32")
    slots, opts = fresh_slots(rows, 65, mesh), SAMPLER_OPTIONS["drawn"]
    which = jnp.arange(rows)

    def draw(logits):
        batch = sampling_batch(slots.knobs, slots.in_prompt, slots.generated, which, which, opts)
        return sample_step(logits, batch, mesh, 65, opts)

    logits = jax.ShapeDtypeStruct((rows, -(-65 // tp) * tp), jnp.float32)
    step = jax.jit(draw).trace(logits)
    found = received_by_kind(list(collectives(step.jaxpr, dict(mesh.shape))))
    planned = exchange_bytes(cfg, layout, StepShape(rows, 1, 4, sampled=True))
    assert planned.get("logits", 0) == found.get("logits", 0)
    assert (tp > 1) == bool(found)


def test_planned_steps_are_the_runners_buckets():
    """66 rows run as 256, a context of 100 tokens with the page table of a short one."""
    layout = Layout(tp=1, dcp_size=1, page_size=64, weights="float32", kv_dtype="float32")
    wanted = Deployment(
        tiny(), layout, None, max_running_requests=66, max_total_tokens=4096, max_model_len=100
    )
    shapes = wanted.steps(100)
    assert (shapes["decode"].rows, shapes["decode"].pages) == (256, 8)
    assert shapes["prefill, owned"].tokens == 256


def traced(cfg: ModelConfig, layout: Layout, shape: StepShape, options: dict[str, Any]):
    """The program of a step of these shapes, and its mesh; nothing is allocated."""
    mesh = make_mesh(layout.tp, layout.dcp_size)
    model = Model(cfg, mesh, jnp.dtype(layout.weights))
    spec = CacheSpec.of(
        cfg,
        pages=shape.pages,
        page_size=layout.page_size,
        dcp_size=layout.dcp_size,
        kv_dtype=layout.kv_dtype,
        index_replicated=layout.index_replicated,
    )
    rows, ints = shape.rows, np.int32
    batch = Batch(
        tokens=np.zeros((rows, shape.tokens), ints),
        starts=np.zeros(rows, ints),
        lengths=np.full(rows, shape.tokens, ints),
        page_table=np.zeros((rows, shape.pages), ints),
    )
    opts = StepOptions(page_size=layout.page_size, path=shape.path, **options)

    def cache(local, part):
        size = (local.shape[0] * (layout.dcp_size if part else 1), *local.shape[1:])
        return jax.ShapeDtypeStruct(size, local.dtype, sharding=NamedSharding(mesh, part))

    caches = jax.tree.map(cache, spec.abstract(), spec.specs())

    def step(params, cache, batch):
        return model.forward(params, cache, batch, spec=spec, opts=opts)

    return jax.jit(step, donate_argnums=1).trace(abstract_params(model), caches, batch), mesh


@pytest.mark.parametrize("path", PrefillPath, ids=lambda path: path.value)
def test_workspace_bounds_what_is_compiled(path):
    """The peak of a prefill step at gathered heads: what XLA allocates, at least.

    Ops in blocks are planned with their whole budget (64 MiB), which XLA need not use up here.
    """
    cfg = tiny(
        num_hidden_layers=1,
        indexer_types=["full"],
        mlp_layer_types=["dense"],
        num_attention_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=64,
        index_topk=64,
    )
    layout = Layout(tp=4, dcp_size=4, page_size=16, weights="float32", kv_dtype="float32")
    shape = StepShape(1, 1024, 64, path)
    program, _ = traced(cfg, layout, shape, {})
    measured = program.lower().compile().memory_analysis().temp_size_in_bytes
    assert measured <= workspace(cfg, layout, shape).peak < 2 * measured + BUDGET


def test_workspace_counts_gathered_heads():
    cfg = ModelConfig.from_hf(named_config("deepseek-v3.2"))
    shape = StepShape(1, 8192, 256)
    parts = [workspace(cfg, Layout(tp=8, dcp_size=w), shape).stages["attention"] for w in (2, 4, 8)]
    sizes = [part["queries of gathered heads"] for part in parts]
    assert sizes == [2 * 8192 * 16 * w * 576 * 2 for w in (2, 4, 8)]
    alone = workspace(cfg, Layout(tp=8), shape).stages
    assert "queries of gathered heads" not in alone["attention"]
    assert "exchanged partial outputs" not in alone["merge and projection"]
