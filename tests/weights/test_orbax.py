"""Orbax directories: saved on one mesh, restored sharded on another."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dcp_jax.config import ModelConfig
from dcp_jax.mesh import make_mesh
from dcp_jax.testing.checkpoints import write_random_checkpoint
from dcp_jax.weights.hf import flatten, load_hf
from dcp_jax.weights.orbax import is_orbax, load_orbax, save_orbax

from .conftest import make_defs


def _params(directory: Path, tp: int, dtype: Any = np.float32) -> dict[str, Any]:
    cfg = ModelConfig.from_hf(directory)
    return load_hf(directory, cfg, make_defs(cfg, tp, dtype, True), make_mesh(tp, tp))


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_config: dict[str, Any]) -> Path:
    directory = write_random_checkpoint(tmp_path / "hf", tiny_config)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("source_tp", "targets"), [(2, [(8, 8), (3, 3)]), (3, [(8, 4)]), (8, [(1, 1), (3, 1)])]
)
def test_restored_on_another_mesh_as_if_loaded_there(
    tmp_path: Path, checkpoint: Path, source_tp: int, targets: list[tuple[int, int]]
):
    cfg = ModelConfig.from_hf(checkpoint)
    saved = tmp_path / "orbax"
    save_orbax(saved, _params(checkpoint, source_tp), checkpoint)
    assert is_orbax(saved)
    assert not is_orbax(checkpoint)
    assert not is_orbax(tmp_path / "absent")
    assert ModelConfig.from_hf(saved) == cfg
    assert (saved / "tokenizer.json").is_file()
    for tp, dcp in targets:
        defs, mesh = make_defs(cfg, tp, np.float32, True), make_mesh(tp, dcp)
        restored = dict(flatten(load_orbax(saved, defs, mesh)))
        direct = dict(flatten(load_hf(checkpoint, cfg, defs, mesh)))
        assert set(restored) == set(direct)
        for name, spec in flatten(defs):
            assert restored[name].sharding == NamedSharding(mesh, spec.spec), name
            assert np.array_equal(restored[name], direct[name]), name


def test_dtype_in_memory_is_the_definitions(tmp_path: Path, checkpoint: Path):
    cfg = ModelConfig.from_hf(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    save_orbax(tmp_path / "orbax", _params(checkpoint, 2, ml_dtypes.bfloat16), config)
    defs, mesh = make_defs(cfg, 3, np.float32, False), make_mesh(3, 3)
    restored = load_orbax(tmp_path / "orbax", defs, mesh)
    assert "mtp" not in restored
    embed = np.asarray(restored["embed"])
    assert embed.dtype == np.float32
    direct = load_hf(checkpoint, cfg, make_defs(cfg, 3, ml_dtypes.bfloat16, False), mesh)
    assert np.array_equal(embed, np.asarray(direct["embed"], np.float32))


def test_what_does_not_fit_is_refused(tmp_path: Path, checkpoint: Path):
    cfg = ModelConfig.from_hf(checkpoint)
    params, mesh = _params(checkpoint, 2), make_mesh(2, 2)
    saved = tmp_path / "orbax"
    config = json.loads((checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match=r"too small or misshapen are \['embed \[62, 48\]"):
        save_orbax(saved, params, {**config, "vocab_size": 63})
    assert not saved.exists()
    without_norm = {name: value for name, value in params.items() if name != "norm"}
    with pytest.raises(ValueError, match=r"only one of them has \['norm'\]"):
        save_orbax(saved, without_norm, config)
    no_mtp = {name: value for name, value in params.items() if name != "mtp"}
    save_orbax(saved, no_mtp, config)
    with pytest.raises(ValueError, match="already holds an Orbax checkpoint"):
        save_orbax(saved, no_mtp, config)
    with pytest.raises(ValueError, match=r"only one of them has \['mtp/eh_proj'"):
        load_orbax(saved, make_defs(cfg, 2, np.float32, True), mesh)
    other = ModelConfig.from_hf({**config, "q_lora_rank": 16})
    with pytest.raises(ValueError, match=r"q_a_proj is \[16, 48\] for \[32, 48\]"):
        load_orbax(saved, make_defs(other, 2, np.float32, False), mesh)
    with pytest.raises(ValueError, match="is not an Orbax checkpoint"):
        load_orbax(checkpoint, make_defs(cfg, 2, np.float32, True), mesh)


def test_unpadded_host_arrays_can_be_saved(tmp_path: Path, checkpoint: Path):
    params = jax.tree.map(np.asarray, _params(checkpoint, 1))
    save_orbax(tmp_path / "orbax", params, checkpoint)
    cfg = ModelConfig.from_hf(checkpoint)
    restored = load_orbax(tmp_path / "orbax", make_defs(cfg, 3, np.float32, True), make_mesh(3, 3))
    direct = _params(checkpoint, 3)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(direct), strict=True)
    )
