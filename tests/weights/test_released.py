"""Checkpoints written in the released forms, and weights made up on the devices."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import dcp_jax as dj
from dcp_jax.cli import main
from dcp_jax.config import ModelConfig
from dcp_jax.configs import named_config
from dcp_jax.mesh import make_mesh
from dcp_jax.model import Model
from dcp_jax.quantization import FP8_CONFIG
from dcp_jax.testing import write_checkpoint
from dcp_jax.testing.harness import tiny_config
from dcp_jax.testing.inventory import inventory
from dcp_jax.testing.released import released_config
from dcp_jax.weights.blocks import dequantize
from dcp_jax.weights.hf import flatten, leaf_shapes
from dcp_jax.weights.mapping import sources
from dcp_jax.weights.random import random_params
from dcp_jax.weights.safetensors_file import INDEX_FILE, Checkpoint

# Two layers: few programs to compile.
SIZES = {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]}
SIZES |= {
    "num_hidden_layers": 2,
    "dtype": "bfloat16",
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.parametrize("quant", [None, "fp8", "mxfp4"])
def test_files_hold_what_the_inventory_lists(tmp_path: Path, quant: Any):
    path = write_checkpoint(tiny_config(**SIZES), None, quant, tmp_path, shard_bytes=50_000)
    cfg = ModelConfig.from_hf(path)
    assert (cfg.quantization is None) == (quant is None)
    checkpoint = Checkpoint(path)
    lines = inventory(cfg)
    assert len(checkpoint) == sum(line.count for line in lines)
    for line in lines:
        for name in line.names:
            assert (checkpoint[name].dtype, checkpoint[name].shape) == (line.dtype, line.shape)
            assert np.any(checkpoint.read(name).view(np.uint8))
    index = json.loads((path / INDEX_FILE).read_text())
    sizes = [
        math.prod(checkpoint[n].shape) and checkpoint[n].end - checkpoint[n].begin
        for n in checkpoint
    ]
    assert index["metadata"]["total_size"] == sum(sizes)
    names = set(index["weight_map"].values())
    assert {
        f"model-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)
    } == names
    assert len(names) > 2


def test_values_do_not_depend_on_files(tmp_path: Path):
    one, many, other = (
        Checkpoint(write_checkpoint(tiny_config(**SIZES), None, "fp8", tmp_path / name, **options))
        for name, options in (("a", {}), ("b", {"shard_bytes": 9000}), ("c", {"seed": 1}))
    )
    assert all(one.read(name).tobytes() == many.read(name).tobytes() for name in one)
    assert one.read("lm_head.weight").tobytes() != other.read("lm_head.weight").tobytes()


def test_layers_are_taken_with_their_kinds():
    every = ModelConfig.from_hf(named_config("glm-5.2"))
    first = ModelConfig.from_hf(released_config("glm-5.2", 5, "fp8"))
    assert first.indexer_types == every.indexer_types[:5]
    chosen = ModelConfig.from_hf(released_config("glm-5.2", (0, 3, 6), None))
    assert chosen.indexer_types == ("full", "shared", "full")
    assert chosen.mlp_layer_types == ("dense", "sparse", "sparse")
    assert (chosen.hidden_size, chosen.num_hidden_layers) == (every.hidden_size, 3)
    deepseek = released_config("deepseek-v3.2", 4, "fp8")
    assert deepseek["quantization_config"]["scale_fmt"] == "ue8m0"
    assert "quantization_config" not in released_config("deepseek-v3.2", 4, None)


@pytest.mark.parametrize(
    ("layers", "quant", "says"),
    [
        (79, None, "not all among the 78 layers"),
        (0, None, "choose at least one"),
        ((3, 4), None, "layer 0 shares its indexer"),
        (2, "int4", "quant='int4' is no released form"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, layers: Any, quant: Any, says: str):
    with pytest.raises(ValueError, match=says):
        write_checkpoint("glm-5.2", layers, quant, tmp_path / "out")


# ---- weights without a checkpoint


@pytest.mark.parametrize(("quant", "tp"), [("fp8", 3), ("mxfp4", 2)])
def test_random_weights_are_the_models_on_the_devices(quant: Any, tp: int):
    cfg = ModelConfig.from_hf(released_config(tiny_config(**SIZES), None, quant))
    model = Model(cfg, make_mesh(tp, tp), jnp.dtype("bfloat16"))
    made, defs = dict(flatten(random_params(model, 3))), dict(flatten(model.param_defs))
    assert set(made) == set(defs)
    shapes = leaf_shapes(sources(cfg, with_mtp=False), model.blocks)
    for name, leaf in defs.items():
        array = made[name]
        assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype), name
        sharding = NamedSharding(model.mesh, leaf.spec)
        assert array.sharding.is_equivalent_to(sharding, array.ndim), name
        outside = np.array(array.astype(jnp.float32))
        assert np.isfinite(outside).all()
        assert outside.any(), name
        outside[tuple(slice(0, n) for n in shapes[name])] = 0
        assert not outside.any(), name
    again = dict(flatten(random_params(model, 3)))
    assert all(np.array_equal(made[name], again[name]) for name in made)
    assert not np.array_equal(made["embed"], dict(flatten(random_params(model, 4)))["embed"])
    if quant == "fp8":  # the spread of a checkpoint's weights: 1 / sqrt(fan_in)
        name = "layers/0/mlp/gate_up_proj"
        data = np.asarray(made[f"{name}/weight"])[:, : cfg.intermediate_size]
        values = dequantize(data, np.asarray(made[f"{name}/scale"]), (1, 128, 128))
        assert 0.9 < values.std() * math.sqrt(cfg.hidden_size) < 1.1


def test_an_llm_without_weights(tmp_path: Path):
    config = tiny_config(**SIZES)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"page_size": 4, "max_total_tokens": 64, "random_weights": True}
    llm = dj.LLM(tmp_path, quantization="fp8", activation_scheme="dynamic", **options)
    assert llm.config.quantization == FP8_CONFIG
    assert llm.engine.runner.params["layers"]["0"]["attn"]["o_proj"]["weight"].dtype == jnp.uint8
    assert np.isfinite(llm.score([1, 2, 3], use_tqdm=False)).all()
    cfg = ModelConfig.from_hf(config)
    for wrong, says in (
        ({"quantization": "int4"}, "quantization='int4' is not supported: use one of"),
        ({"quantization": "fp8", "dtype": "float32"}, "no effect with dtype='float32'"),
        ({"activation_scheme": "dynamic"}, "weights are bfloat16: leave it out, or hold"),
        ({"params": {}}, "random_weights=True has no effect with params"),
    ):
        with pytest.raises(ValueError, match=says):
            dj.LLM(cfg, **{**options, **wrong})
    mxfp4 = ModelConfig.from_hf(released_config(config, None, "mxfp4"))
    with pytest.raises(ValueError, match="which is MXFP4"):
        dj.LLM(mxfp4, quantization="fp8", **options)
    with pytest.raises(ValueError, match="weights are MXFP4: leave it out"):
        dj.LLM(mxfp4, activation_scheme="dynamic", **options)


def test_convert_writes_what_the_engine_reads(tmp_path: Path, capsys):
    source = write_checkpoint(tiny_config(**SIZES), None, None, tmp_path / "hf")
    target = tmp_path / "orbax"
    main(["convert", str(source), str(target), "--tp", "2", "--quantization", "fp8"])
    assert f"wrote {target}" in capsys.readouterr().out.replace("\n", "")
    cfg = ModelConfig.from_hf(target)
    assert cfg.quantization == FP8_CONFIG
    model = Model(cfg, make_mesh(3), jnp.dtype("bfloat16"))
    got = dict(flatten(dj.load_params(target, model)))
    want = dict(flatten(dj.load_params(source, model)))
    assert all(np.array_equal(got[name], want[name]) for name in want)
    for arguments, says in (
        ([str(source), str(target)], "already holds an Orbax checkpoint"),
        ([str(target), str(tmp_path / "other")], "is an Orbax directory already"),
    ):
        with pytest.raises(SystemExit):
            main(["convert", *arguments])
        assert says in capsys.readouterr().err
