"""The model's own parameter definitions, and a small config."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_jax.config import ModelConfig
from dcp_jax.mesh import make_mesh
from dcp_jax.model import Model

GOLDEN = Path(__file__).parents[1] / "golden"


def make_defs(cfg: ModelConfig, tp: int, dtype: Any, with_mtp: bool = False) -> dict[str, Any]:
    """Definitions padded to multiples of `tp` where the model shards."""
    return Model(cfg, make_mesh(tp), np.dtype(dtype), with_mtp).param_defs


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """A small config with every kind of layer: dense and sparse, full and shared, MTP."""
    config = json.loads((GOLDEN / "p3_glm_indexshare" / "config.json").read_text())
    return {**config, "num_nextn_predict_layers": 1, "vocab_size": 61}
