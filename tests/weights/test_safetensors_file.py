"""Safetensors files read by slices, and what is said of bad ones."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcp_jax.weights.safetensors_file import INDEX_FILE, SINGLE_FILE, Checkpoint, TensorFile


def _tensors() -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((6, 8), dtype=np.float32)
    return {
        "f32": values,
        "bf16": values.astype(ml_dtypes.bfloat16),
        "f16": values.astype(np.float16),
        "fp8": values.astype(ml_dtypes.float8_e4m3fn),
        "i64": np.arange(5),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(7),
    }


def test_every_dtype_is_read_bit_exactly(tmp_path: Path):
    tensors = {name: np.asarray(value) for name, value in _tensors().items()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    file = TensorFile(tmp_path / SINGLE_FILE)
    assert set(file.tensors) == set(tensors)
    for name, value in tensors.items():
        read = file.read(name)
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert read.tobytes() == value.tobytes()
        assert file.tensors[name].shape == value.shape


def test_a_slice_of_a_view_reads_only_its_bytes(tmp_path: Path):
    values = np.arange(48, dtype=np.float32).reshape(6, 8)
    save_file({"x": values}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    part = checkpoint.read("x", (slice(1, 2), slice(0, 2)), (2, 3, 8))
    assert np.array_equal(part, values.reshape(2, 3, 8)[1:2, :2])
    assert checkpoint.bytes_read == part.nbytes == 2 * 8 * 4
    assert not part.flags.writeable


def test_files_without_an_index_are_one_checkpoint(tmp_path: Path):
    save_file({"a": np.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(2)}, tmp_path / "two.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint) == ["a", "b"]
    assert len(checkpoint) == 2
    assert "b" in checkpoint
    assert np.array_equal(checkpoint.read("b"), np.ones(2))


def _rewrite_header(path: Path, change: Callable[[dict], None]) -> None:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + size :])


def _truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@dataclass(frozen=True)
class BadFile:
    id: str
    spoil: Callable[[Path], None]
    says: str


BAD_FILES = [
    BadFile("data_cut", lambda p: _truncate(p, p.stat().st_size - 1), "is truncated"),
    BadFile("header_cut", lambda p: _truncate(p, 40), "is truncated or not a safetensors"),
    BadFile("empty", lambda p: p.write_bytes(b""), "is truncated or not a safetensors"),
    BadFile("garbage", lambda p: p.write_bytes(b"\xff" * 99), "is truncated or not a safetensors"),
    BadFile("lfs", lambda p: p.write_text("version https://git-lfs.github.com/spec/v1"), "git lfs"),
    BadFile(
        "not_json",
        lambda p: p.write_bytes((4).to_bytes(8, "little") + b"nope"),
        "is corrupt: its header",
    ),
    BadFile("a_list", lambda p: p.write_bytes((2).to_bytes(8, "little") + b"[]"), "is corrupt"),
    BadFile("no_shape", lambda p: _rewrite_header(p, lambda h: h["x"].pop("shape")), "is corrupt"),
    BadFile(
        "unknown_dtype",
        lambda p: _rewrite_header(p, lambda h: h["x"].update(dtype="F3")),
        "tensor x has the dtype F3",
    ),
    BadFile(
        "wrong_extent",
        lambda p: _rewrite_header(p, lambda h: h["x"].update(shape=[2])),
        r"is corrupt: tensor x \(F32, \[2\]\) takes 8 bytes, and its offsets span 48",
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in BAD_FILES])
def test_a_bad_file_is_named_in_one_sentence(tmp_path: Path, case: BadFile):
    path = tmp_path / SINGLE_FILE
    save_file({"x": np.zeros((3, 4), np.float32)}, path)
    case.spoil(path)
    with pytest.raises(ValueError, match=case.says) as caught:
        Checkpoint(tmp_path)
    assert str(path) in str(caught.value)


@dataclass(frozen=True)
class BadDirectory:
    id: str
    files: dict[str, str]
    says: str


BAD_DIRECTORIES = [
    BadDirectory("no_weights", {"config.json": "{}"}, "holds no weights"),
    BadDirectory("index_not_json", {INDEX_FILE: "{"}, "is not a safetensors index"),
    BadDirectory("index_without_map", {INDEX_FILE: "{}"}, "is not a safetensors index"),
    BadDirectory(
        "shard_absent",
        {INDEX_FILE: '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'},
        r"lacks 1 of the 2 files .* \(b.safetensors\)",
    ),
    BadDirectory(
        "tensor_absent",
        {INDEX_FILE: '{"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}'},
        r"names 1 tensors that none of its files holds \(y\)",
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in BAD_DIRECTORIES])
def test_a_bad_directory_is_named_in_one_sentence(tmp_path: Path, case: BadDirectory):
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    if INDEX_FILE in case.files:
        save_file({"x": np.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=case.says) as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_directory_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a directory"):
        Checkpoint(tmp_path / "absent")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    for name in ("one", "two"):
        save_file({"x": np.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        ValueError, match=r"tensor x is in both one\.safetensors and two\.safetensors"
    ):
        Checkpoint(tmp_path)
