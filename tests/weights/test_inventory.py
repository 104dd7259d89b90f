"""The released checkpoints' tensors, as checked in, against the parameters: no weights needed.

A file's lines are those of `dcp_jax.testing.inventory.inventory(config)`.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcp_jax.config import ModelConfig
from dcp_jax.configs import named_config
from dcp_jax.quantization import FP8_CONFIG, block_format
from dcp_jax.testing.inventory import Line, inventory
from dcp_jax.testing.released import released_config
from dcp_jax.weights.mapping import MTP_COPIES, is_ignorable, quantized_params, sources

DIRECTORY = Path(__file__).parent / "inventories"


@dataclass(frozen=True)
class Release:
    """`billions` of parameters, MTP layer included, as the model pages have them."""

    id: str
    config: str
    fp8: bool
    tensors: int
    billions: float


RELEASES = [
    Release("GLM-5.1", "glm-5", False, 59_870, 754),
    Release("GLM-5.2-FP8", "glm-5.2", True, 118_629, 753),
    Release("DeepSeek-V3.2", "deepseek-v3.2", True, 92_425, 685),
]
EACH = pytest.mark.parametrize("release", [pytest.param(r, id=r.id) for r in RELEASES])


def config_of(release: Release) -> ModelConfig:
    raw = named_config(release.config)
    if release.fp8:
        raw.setdefault("quantization_config", FP8_CONFIG)
    return ModelConfig.from_hf(raw)


def checked_in(release: Release) -> list[Line]:
    return [Line.parse(text) for text in (DIRECTORY / f"{release.id}.txt").read_text().splitlines()]


@EACH
def test_the_checked_in_list_is_the_specification(release: Release):
    lines = checked_in(release)
    assert lines == inventory(config_of(release))
    assert sum(line.count for line in lines) == release.tensors
    values = sum(
        line.count * math.prod(line.shape) for line in lines if "scale_inv" not in line.pattern
    )
    assert round(values / 1e9) == release.billions


@EACH
def test_tensors_and_parameters_map_one_to_one(release: Release):
    """Every tensor is one parameter's, or two windows' that cover it; every scale goes with one."""
    cfg = config_of(release)
    stored = {name: line for line in checked_in(release) for name in line.names}
    assert len(stored) == release.tensors
    table = sources(cfg, with_mtp=True, available=stored)
    users = Counter(name for source in table.values() for name in source.names)
    scales = set()
    held = quantized_params(cfg, with_mtp=True)
    kind = block_format(cfg.quantization)
    for path, source in table.items():
        assert (path in held) == (source.quantized and release.fp8), path
        for name in source.names:
            line = stored[name]
            assert line.shape == source.tensor_shape, name
            assert (line.dtype == "F8_E4M3") == (path in held), name
            if path in held:
                assert kind is not None
                scale = stored[kind.scale_of(name)]
                assert scale.dtype == "F32"
                assert scale.shape == tuple(-(-n // 128) for n in line.shape), name
                scales.add(kind.scale_of(name))
    windows = {name for name, count in users.items() if count > 1}
    assert windows == {name for name in stored if name.endswith("kv_b_proj.weight")}
    rest = set(stored) - set(users) - scales
    last = f"model.layers.{cfg.num_hidden_layers}."
    copies = {last + name for name in MTP_COPIES} if "DeepSeek" in release.id else set()
    assert rest == copies
    assert all(is_ignorable(name, cfg, with_mtp=True, names=stored) for name in rest)
    for name in windows:
        path = next(path for path, source in table.items() if name in source.names)
        parts = [
            table[path.replace("w_uv", part).replace("w_uk", part)] for part in ("w_uk", "w_uv")
        ]
        assert sum(math.prod(part.shape) for part in parts) == math.prod(stored[name].shape)


def test_a_line_is_read_back_and_checked():
    line = Line("model.layers.{0,2}.mlp.experts.{0-3}.up_proj.weight", "F8_E4M3", (4, 6))
    assert Line.parse(str(line)) == line
    assert list(line.names)[4] == "model.layers.2.mlp.experts.0.up_proj.weight"
    with pytest.raises(ValueError, match="stands for 8 tensors"):
        Line.parse(str(line).replace("x8", "x9"))
    with pytest.raises(ValueError, match="is no line"):
        Line.parse("norm BF16")


def test_mxfp4_lists_experts_only():
    cfg = ModelConfig.from_hf(released_config("glm-5.2", None, "mxfp4"))
    lines = inventory(cfg)
    packed = {line.pattern.rsplit(".", 1)[0]: line.shape for line in lines if line.dtype == "U8"}
    experts = "model.layers.{3-77}.mlp.experts.{0-255}."
    assert packed.pop(f"{experts}gate_proj", None) is not None
    assert set(packed) == {f"{experts}{name}_proj" for name in ("up", "down")}
    assert set(quantized_params(cfg, with_mtp=True)) == {
        f"layers/{i}/mlp/experts_{part}" for i in range(3, 78) for part in ("gate_up", "down")
    }
