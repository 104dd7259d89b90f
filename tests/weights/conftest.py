"""Stand-ins for the model's parameter definitions, and small configs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from dcp_jax.config import ModelConfig
from dcp_jax.weights.hf import unflatten
from dcp_jax.weights.mapping import sources

GOLDEN = Path(__file__).parents[1] / "golden"
TP = ("model", "dcp")

# Axis that shards, by the end of the parameter's path; everything else is replicated.
_SHARDED_AXIS = {
    "embed": 0,
    "lm_head": 0,
    "attn/q_b_proj": 0,
    "attn/w_uk": 0,
    "attn/w_uv": 0,
    "attn/o_proj": 1,
    "mlp/gate_up_proj": 1,
    "shared/gate_up_proj": 1,
    "mlp/down_proj": 1,
    "shared/down_proj": 1,
    "mlp/experts_gate_up": 2,
    "mlp/experts_down": 2,
}
_FLOAT32 = ("k_norm_weight", "k_norm_bias", "mlp/gate", "e_score_correction_bias")


@dataclass(frozen=True)
class Def:
    """Shape, dtype and sharding of a parameter, as the model gives them."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


def make_mesh(tp: int, dcp: int) -> Mesh:
    """A mesh of `tp` devices."""
    return jax.make_mesh(
        (1, tp // dcp, dcp),
        ("dp", "model", "dcp"),
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:tp],
    )


def make_defs(cfg: ModelConfig, tp: int, dtype: Any, with_mtp: bool = False) -> dict[str, Any]:
    """Definitions padded to multiples of `tp` where the model shards."""
    flat = {}
    for name, source in sources(cfg, with_mtp=with_mtp).items():
        shape, spec = list(source.shape), [None] * len(source.shape)
        axis = next((a for end, a in _SHARDED_AXIS.items() if name.endswith(end)), None)
        if axis is not None:
            shape[axis] = -(-shape[axis] // tp) * tp
            spec[axis] = TP
        kept = np.float32 if name.endswith(_FLOAT32) else dtype
        flat[name] = Def(tuple(shape), np.dtype(kept), PartitionSpec(*spec))
    return unflatten(flat)


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """A small config with every kind of layer: dense and sparse, full and shared, MTP."""
    config = json.loads((GOLDEN / "p3_glm_indexshare" / "config.json").read_text())
    return {**config, "num_nextn_predict_layers": 1, "vocab_size": 61}
