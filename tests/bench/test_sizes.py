"""Cases, their costs, what fits a device, and options that are refused: plain numbers."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from dcp_jax import bench
from dcp_jax.bench.cases import Shape, pool_pages, shape_of, whole_numbers
from dcp_jax.bench.cost import flops, selected_keys
from dcp_jax.bench.memory import check_fits, param_bytes
from dcp_jax.cache.pool import CacheSpec
from dcp_jax.config import ModelConfig
from dcp_jax.configs import named_config
from dcp_jax.layers.param import ParamDef
from dcp_jax.mesh import TP, make_mesh
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import tiny_config

GLM = ModelConfig.from_hf(named_config("glm-5.2"))


def test_grid_lists_each_case_once():
    assert bench.grid((8, 0, 8), (2,), (1, 3)) == (
        bench.Case(0, 2, 1),
        bench.Case(0, 2, 3),
        bench.Case(8, 2, 1),
        bench.Case(8, 2, 3),
    )
    assert [str(c) for c in bench.grid((8,), (2,), (1, 3))] == ["8+2", "3 x 8+2"]


def test_shapes_are_the_runners_buckets():
    case = bench.Case(prefix=1000, extend=100, batch=3)
    # 1100 tokens in pages of 4 x 16: 18; buckets 8 (512 tokens), 16, 32
    assert pool_pages([case], 16, 4) == 54
    assert shape_of(case, 16, 4, 54) == Shape(rows=4, tokens=256, pages=32)


@pytest.mark.parametrize(
    ("values", "least", "text"),
    [
        (("0", "a"), 0, "--prefix a is not"),
        (("-1",), 0, "--prefix -1 is not"),
        (("0",), 1, "--prefix 0 is not"),
        (("1.5",), 0, "--prefix 1.5 is not"),
        ((), 0, "--prefix has no value"),
    ],
)
def test_numbers_that_are_none_are_refused(values, least, text):
    with pytest.raises(ValueError, match=text):
        whole_numbers("--prefix", values, least)
    assert whole_numbers("--prefix", ("0", "8192"), 0) == (0, 8192)


@pytest.mark.parametrize(
    "case", [bench.Case(0, 5), bench.Case(3, 5), bench.Case(2, 2), bench.Case(20, 3)], ids=str
)
def test_selected_keys_are_the_mean_of_each_tokens(case):
    each = [min(position + 1, 6) for position in range(case.prefix, case.keys)]
    assert selected_keys(case, 6) == pytest.approx(sum(each) / len(each))


def cost(path, case, full=True, feed_forward="none", dcp_size=4):
    return flops(
        GLM,
        case,
        path,
        tp=8,
        heads=8,
        dcp_size=dcp_size,
        full=full,
        feed_forward=feed_forward,
    )


def test_flops_follow_the_policys_cost_model():
    case = bench.Case(prefix=32768, extend=2048, batch=2)
    n, s = 2 * 2048, 32768 + 2049 / 2
    gathered = cost(PrefillPath.GATHERED, case)
    assert gathered["indexer"] == 2 * n * s * 32 * 128
    assert cost(PrefillPath.OWNED, case)["indexer"] == gathered["indexer"] / 4
    assert cost(PrefillPath.OWNED, case)["attention"] == gathered["attention"]
    absorption = 2 * n * 8 * (192 + 256) * 512
    assert gathered["attention"] == 2 * n * 2048 * 8 * (2 * 512 + 64) + absorption
    assert cost(PrefillPath.GATHERED, case, full=False)["indexer"] == 0
    short = bench.Case(0, 512)
    dense = cost(PrefillPath.MHA_ONE_SHOT, short)
    assert dense["indexer"] == 0
    heads = 2 * 512 * (513 / 2) * 8 * (192 + 64 + 256)
    assert dense["attention"] == heads + 2 * 512 * 8 * (192 + 256) * 512
    more = cost(PrefillPath.GATHERED, case, feed_forward="dense")["linear"] - gathered["linear"]
    assert more == 6 * n * 6144 * 12288 / 8


def test_what_does_not_fit_is_refused_with_all_sizes():
    mesh = make_mesh(4, 2)
    defs = {
        "a": ParamDef((8, 6), jnp.dtype("float32"), PartitionSpec(TP)),
        "b": {"c": ParamDef((5,), jnp.dtype("bfloat16"), PartitionSpec())},
    }
    weights = param_bytes(defs, mesh)
    assert weights == 8 * 6 * 4 // 4 + 10
    spec = CacheSpec.of(GLM, pages=100, page_size=64, dcp_size=2, kv_dtype="fp8_e4m3")
    caches = sum(spec.rank_bytes().values())
    fits = (weights + caches + 1000) / 0.95
    check_fits([bench.Case(0, 8)], weights, spec, 1000, round(fits) + 1)
    cases = [bench.Case(0, 8, 64), bench.Case(4096, 8, 2)]
    with pytest.raises(ValueError, match=r"2 rows of 4096 \+ 8 tokens need about .* GiB a device"):
        check_fits(cases, weights, spec, 1000, round(fits) - 1000)


def test_random_weights_take_dense_layers_and_stand_for_the_whole_model():
    options = bench.PrefillOptions(model="glm-5.2", layers=2, random_weights=True)
    cfg = options.timed_config()
    assert (cfg.num_hidden_layers, cfg.mlp_layer_types) == (2, ("dense", "dense"))
    kinds = {t.kind: (t.number, t.sparse, t.stands_for) for t in options.timed_layers()}
    assert kinds == {"full": (0, False, 21), "shared": (1, False, 57)}
    whole = replace(options, model=tiny_config(), layers=None)
    assert whole.timed_config().num_hidden_layers == 3
    alone = replace(whole, layers=1)
    assert [t.number for t in alone.timed_layers()] == [0, 0]


def test_a_checkpoint_is_timed_with_its_own_layers(golden):
    options = bench.PrefillOptions(model=golden("p3").path)
    cfg = ModelConfig.from_hf(golden("p3").path)
    for timed in options.timed_layers():
        assert cfg.is_full(timed.number) == (timed.kind == "full")
        assert cfg.is_sparse(timed.number) == timed.sparse
        assert cfg.indexer_types.count(timed.kind) == timed.stands_for


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": "glm-9"}, "'glm-9' is no directory and no released model"),
        ({"random_weights": False}, "glm-5.2 is a config without weights"),
        ({"layers": 0}, "layers=0 is not a count"),
        ({"paths": ("dense",)}, "'dense' is not a valid PrefillPath: use some of"),
        ({"parts": ("mlp",)}, "parts='mlp' is not supported"),
        ({"cases": ()}, "cases is empty"),
        ({"gather_chunk_tokens": (0,)}, "gather_chunk_tokens=0"),
        ({"dcp_size": 2}, "dcp_size=2 does not divide tp=1"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not supported"),
    ],
)
def test_options_that_cannot_run_are_refused(given, text):
    with pytest.raises(ValueError, match=text):
        bench.PrefillOptions(**{"model": "glm-5.2", "random_weights": True, **given})


def test_more_layers_than_there_are_are_refused():
    options = bench.PrefillOptions(model="glm-5.2", random_weights=True, layers=79)
    with pytest.raises(ValueError, match="layers=79 is more than the 78"):
        options.timed_config()
