"""Checkpoints in a released form, of any size: real dimensions and few layers, to test and measure.

Names, dtypes, shapes and files are the release's (`inventory`); the values are random. Every tensor
is made and written in pieces at its place in the file, several at once, so that host memory stays
at a few pieces however large the checkpoint is.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from dcp_jax.config import ModelConfig
from dcp_jax.configs import named_config
from dcp_jax.quantization import FP8_CONFIG, BlockFormat, block_format
from dcp_jax.testing.checkpoints import random_rows
from dcp_jax.testing.inventory import inventory
from dcp_jax.weights.blocks import FORMATS, quantize, quantize_mxfp4
from dcp_jax.weights.safetensors_file import DTYPES, INDEX_FILE

_PIECE_VALUES = 2**22

QUANTS = (None, "fp8", "mxfp4")


@dataclass(frozen=True)
class _Tensor:
    """A tensor's place: file, bytes from `begin` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPES[self.dtype].itemsize


def write_checkpoint(
    config: str | Mapping[str, Any],
    layers: int | Sequence[int] | None,
    quant: Literal["fp8", "mxfp4"] | None,
    out: str | Path,
    *,
    seed: int = 0,
    shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> Path:
    """Writes a checkpoint in the released form with random values.

    Args:
        config: a config.json as a dict, or a name of `configs`.
        layers: how many of the model's layers, the first ones; or which, by number; None: all. The
            MTP layer is written beside them if the config has one.
        quant: None (as the config's dtype says), "fp8" (128 x 128 blocks; the config's own
            quantization_config if it has one) or "mxfp4" (routed experts of the main model).
        out: directory, made if absent.
        seed: of all values; they do not depend on the files or the number of threads.
        shard_bytes: most bytes of a file, unless one tensor has more.
        progress: show a bar.

    Returns:
        The directory.

    Raises:
        ValueError: layers that the model has not or that cannot stand alone, or an unknown `quant`.
    """
    raw = released_config(config, layers, quant)
    cfg = ModelConfig.from_hf(raw)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    tensors = _create_files(cfg, out, shard_bytes)
    stored = block_format(cfg.quantization)
    ue8m0 = bool(cfg.quantization) and cfg.quantization.get("scale_fmt") == "ue8m0"
    scales = {stored.scale_of(name) for name in tensors} if stored else set()
    work = [tensor for name, tensor in tensors.items() if name not in scales]
    total = sum(tensor.nbytes for tensor in work)

    def write(tensor: _Tensor) -> int:
        if stored is not None and FORMATS.get(tensor.dtype) == stored:
            scale = tensors[stored.scale_of(tensor.name)]
            pieces = _quantized(tensor, stored, ue8m0, seed)
            _write_at([tensor, scale], pieces)
        else:
            rows = random_rows(tensor.name, tensor.shape, seed, _rows(tensor.shape))
            _write_at([tensor], ((piece.astype(DTYPES[tensor.dtype]),) for piece in rows))
        return tensor.nbytes

    bar = tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=not progress)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        for written in pool.map(write, work):
            bar.update(written)
    return out


def released_config(
    config: str | Mapping[str, Any], layers: int | Sequence[int] | None, quant: str | None
) -> dict[str, Any]:
    """The config.json of some layers of a model in a released form; see `write_checkpoint`."""
    if quant not in QUANTS:
        raise ValueError(f"quant={quant!r} is no released form: use one of {QUANTS}.")
    raw = dict(named_config(config) if isinstance(config, str) else config)
    given = raw.pop("quantization_config", None)
    cfg = ModelConfig.from_hf(raw)
    if layers is not None:
        chosen = list(range(layers)) if isinstance(layers, int) else list(layers)
        strangers = [layer for layer in chosen if not 0 <= layer < cfg.num_hidden_layers]
        if strangers or not chosen:
            raise ValueError(
                f"layers={layers!r} are not all among the {cfg.num_hidden_layers} layers of the "
                "model: choose at least one, counted from 0."
            )
        raw |= {
            "num_hidden_layers": len(chosen),
            "indexer_types": [cfg.indexer_types[layer] for layer in chosen],
            "mlp_layer_types": [cfg.mlp_layer_types[layer] for layer in chosen],
        }
        raw.pop("layer_types", None)
        cfg = ModelConfig.from_hf(raw)
    if quant == "fp8":
        raw["quantization_config"] = given or FP8_CONFIG
    elif quant == "mxfp4":
        raw["quantization_config"] = _quark_config(cfg)
    return raw


def _quark_config(cfg: ModelConfig) -> dict[str, Any]:
    """As Quark writes it for a model of which only the routed experts are quantised."""
    dense = [layer for layer in range(cfg.num_hidden_layers) if not cfg.is_sparse(layer)]
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": {**weight, "is_dynamic": True}},
        "exclude": [
            *("lm_head", "*self_attn*", "*mlp.shared_experts*", "*mlp.gate"),
            *(f"model.layers.{layer}.mlp" for layer in dense),
            f"model.layers.{cfg.num_hidden_layers}",
        ],
    }


def _create_files(cfg: ModelConfig, out: Path, shard_bytes: int) -> dict[str, _Tensor]:
    """Files of their full size with headers and no data, and the index; tensors by name."""
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = total = 0
    for line in inventory(cfg):
        size = int(np.prod(line.shape)) * DTYPES[line.dtype].itemsize
        for name in line.names:
            if shards[-1] and filled + size > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append((name, line.dtype, line.shape))
            filled += size
            total += size
    tensors: dict[str, _Tensor] = {}
    for number, members in enumerate(shards, start=1):
        path = out / f"model-{number:05}-of-{len(shards):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, dtype, shape in members:
            end = at + int(np.prod(shape)) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
        for name, dtype, shape in members:
            begin = 8 + len(text) + header[name]["data_offsets"][0]
            tensors[name] = _Tensor(name, dtype, shape, path, begin)
    weight_map = {name: tensor.file.name for name, tensor in tensors.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return tensors


def _rows(shape: tuple[int, ...]) -> int:
    """Rows of a piece: whole blocks."""
    return max(1, _PIECE_VALUES // int(np.prod(shape[1:])) // 128) * 128


def _quantized(
    tensor: _Tensor, stored: BlockFormat, ue8m0: bool, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows, columns = tensor.shape
    shape = (rows, columns * stored.values_per_byte)
    for piece in random_rows(tensor.name, shape, seed, _rows(shape)):
        yield quantize(piece, ue8m0=ue8m0) if stored.kind == "e4m3" else quantize_mxfp4(piece)


def _write_at(tensors: list[_Tensor], pieces: Iterator[tuple[np.ndarray, ...]]) -> None:
    """Each tensor's pieces, one after another from its place on."""
    streams = []
    try:
        for tensor in tensors:
            streams.append(tensor.file.open("r+b"))
            streams[-1].seek(tensor.begin)
        for parts in pieces:
            for stream, part in zip(streams, parts, strict=True):
                stream.write(np.ascontiguousarray(part).view(np.uint8).data)
    finally:
        for stream in streams:
            stream.close()
