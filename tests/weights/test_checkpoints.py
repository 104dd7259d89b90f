"""Random checkpoints: reproducible, in Hugging Face's layout, with sensible scales."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dcp_jax.testing.checkpoints import random_tensors, write_random_checkpoint
from dcp_jax.weights.safetensors_file import INDEX_FILE, SINGLE_FILE


def test_same_seed_same_bytes(tmp_path: Path, tiny_config: dict[str, Any]):
    a, b, c = (
        (write_random_checkpoint(tmp_path / name, tiny_config, seed) / SINGLE_FILE).read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a == b
    assert a != c


def test_a_tensor_does_not_depend_on_the_others(tiny_config: dict[str, Any]):
    full = random_tensors(tiny_config)
    fewer = random_tensors({**tiny_config, "num_nextn_predict_layers": 0})
    assert set(fewer) < set(full)
    assert all(np.array_equal(value, full[name]) for name, value in fewer.items())


def test_names_and_dtypes(tmp_path: Path, tiny_config: dict[str, Any]):
    write_random_checkpoint(tmp_path, tiny_config, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / SINGLE_FILE)
    with_indexer = {name.split(".")[2] for name in tensors if ".indexer." in name}
    assert with_indexer == {"0", "1", "3", "5"}  # F F S F S, and the MTP layer
    kept = {name for name, value in tensors.items() if value.dtype == np.float32}
    assert kept == {
        n for n in tensors if n.endswith(("k_norm.weight", "k_norm.bias", "correction_bias"))
    }
    assert {value.dtype for name, value in tensors.items() if name not in kept} == {
        np.dtype(ml_dtypes.bfloat16)
    }


def test_scales(tiny_config: dict[str, Any]):
    tensors = random_tensors(tiny_config)
    hidden = tiny_config["hidden_size"]
    for name, centre, spread in (
        ("model.norm.weight", 1, 0.1),
        ("model.embed_tokens.weight", 0, 1),
        ("lm_head.weight", 0, 2 / hidden**0.5),
        ("model.layers.1.mlp.gate.weight", 0, hidden**-0.5),
    ):
        assert abs(tensors[name].mean() - centre) < spread / 2
        assert 0.7 < tensors[name].std() / spread < 1.3


def test_shards_hold_everything_once(tmp_path: Path, tiny_config: dict[str, Any]):
    write_random_checkpoint(tmp_path, tiny_config, shards=3)
    weight_map = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    assert set(weight_map) == set(random_tensors(tiny_config))
    for file_name in set(weight_map.values()):
        stored = load_file(tmp_path / file_name)
        assert set(stored) == {name for name, file in weight_map.items() if file == file_name}


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"shards": 0}, {"shards": 10_000}])
def test_wrong_arguments_are_refused(
    tmp_path: Path, tiny_config: dict[str, Any], wrong: dict[str, Any]
):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}="):
        write_random_checkpoint(tmp_path, tiny_config, **wrong)
