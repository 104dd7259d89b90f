"""Orbax directories: parameters saved from one mesh and restored, already sharded, onto another.

Layout of a directory: `params/` (an Orbax checkpoint of the nested dict), `config.json` (the
Hugging Face config) and, when saved from a Hugging Face directory, its tokenizer files: `LLM` takes
either kind of directory.

Arrays are saved as they lie in memory, padding included, and restored with the padding of the
target: a zero tail is cut or grown, which is right because every value outside the logical shape
is zero. The logical shapes follow from the config; a restored definition that would cut real values
is refused. Every process reads only its own shards.

The saved config says how the parameters are held: with its `quantization_config` if in blocks (of
which a float32 model dequantises them on the devices), without it if not.
"""

import json
import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import v1 as ocp

from dcp_jax.config import ModelConfig
from dcp_jax.layers.param import ParamDef
from dcp_jax.quantization import FP8_CONFIG, Blocks
from dcp_jax.weights.hf import check_defs, flatten, leaf_shapes, unflatten
from dcp_jax.weights.mapping import quantized_params, sources
from pallas_kernels.block_format import dequantize_blocks

PARAMS_DIRECTORY = "params"
# A chunk is the least that a restoring device reads: without a bound, a whole array saved at tp=1.
_CHUNK_BYTES = 64 * 2**20

_CONFIG_FILE = "config.json"
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def is_orbax(path: str | PathLike[str]) -> bool:
    """Whether `path` is a directory that `save_orbax` wrote."""
    params = Path(path) / PARAMS_DIRECTORY
    return params.is_dir() and ocp.is_orbax_checkpoint(str(params.absolute()))


def refuse_existing(path: str | PathLike[str]) -> None:
    """Refuse a directory that a checkpoint was, or began to be, saved to.

    Raises:
        ValueError: it is one.
    """
    if (Path(path) / PARAMS_DIRECTORY).exists():
        raise ValueError(f"{path} already holds an Orbax checkpoint; save to another directory")


def save_orbax(
    path: str | PathLike[str],
    params: Mapping[str, Any],
    config: Mapping[str, Any] | str | PathLike[str],
) -> None:
    """Saves parameters, padded or not, with what `LLM` needs beside them.

    Args:
        path: directory to make; a checkpoint already in it is refused.
        params: nested dict of arrays, as `load_hf` returns it.
        config: a Hugging Face config.json as a dict, or the directory that holds it, whose
            tokenizer files are copied too.

    Raises:
        ValueError: the directory has a checkpoint, or the parameters are not those of the config.
    """
    path = Path(path).absolute()
    refuse_existing(path)
    if isinstance(config, Mapping):
        source, raw = None, dict(config)
    else:
        source, raw = Path(config), _read_config(Path(config))
    flat = dict(flatten(params))
    in_blocks = any(name.endswith("/scale") for name in flat)
    if in_blocks and ModelConfig.from_hf(raw).quantization is None:
        raw["quantization_config"] = FP8_CONFIG
    if not in_blocks:
        raw.pop("quantization_config", None)
        raw.pop("quantization", None)
    cfg = ModelConfig.from_hf(raw)
    _check_extents(
        {name: array.shape for name, array in flat.items()},
        _logical_shapes(cfg, with_mtp="mtp" in params, in_blocks=in_blocks),
    )
    path.mkdir(parents=True, exist_ok=True)
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    with context:
        ocp.save(str(path / PARAMS_DIRECTORY), unflatten(flat))
    if jax.process_index() == 0:
        (path / _CONFIG_FILE).write_text(json.dumps(raw, indent=1), encoding="utf-8")
        for name in _COMPANIONS:
            if source is not None and (source / name).is_file():
                shutil.copyfile(source / name, path / name)


def load_orbax(path: str | PathLike[str], defs: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Restores the parameters that `defs` describes, sharded over `mesh`.

    A saved MTP layer is left alone when `defs` has none. What is saved in blocks is dequantised
    where `defs` has one array for it.

    Raises:
        ValueError: `path` is not such a directory, or its parameters are not those of `defs`.
    """
    path = Path(path).absolute()
    if not is_orbax(path):
        raise ValueError(
            f"{path} is not an Orbax checkpoint: it has no {PARAMS_DIRECTORY}/ that save_orbax"
            " finished writing"
        )
    cfg = ModelConfig.from_hf(_read_config(path))
    flat = dict(flatten(defs))
    wanted = {name.removesuffix("/scale") for name in flat if name.endswith("/scale")}
    blocks = quantized_params(cfg, with_mtp="mtp" in defs)
    if wanted - set(blocks):
        raise ValueError(
            f"{path} holds weights that are not quantised: convert the Hugging Face directory with "
            "--quantization fp8, or load these as they are"
        )
    dense = {name: flat.pop(name) for name in set(blocks) - wanted}
    for name, leaf in dense.items():
        flat |= _leaves_in_blocks(name, leaf, blocks[name])
    logical = _logical_shapes(cfg, with_mtp="mtp" in defs, in_blocks=True)
    check_defs(flat, logical)
    stored = dict(flatten(ocp.metadata(str(path / PARAMS_DIRECTORY)).metadata))
    unwanted = {name for name in stored if name.startswith("mtp/") and "mtp" not in defs}
    _check_extents({n: leaf.shape for n, leaf in stored.items() if n not in unwanted}, logical)
    target: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=NamedSharding(mesh, spec.spec))
        for name, spec in flat.items()
    }
    target.update(dict.fromkeys(unwanted, ocp.PLACEHOLDER))
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = True
    with context:
        restored = dict(flatten(ocp.load(str(path / PARAMS_DIRECTORY), unflatten(target))))
    for name, leaf in dense.items():
        data, scale = restored.pop(f"{name}/weight"), restored.pop(f"{name}/scale")
        restored[name] = _dequantized(data, scale, blocks[name], leaf, mesh)
    return unflatten({name: restored[name] for name, _ in flatten(defs)})


def _logical_shapes(
    cfg: ModelConfig, *, with_mtp: bool, in_blocks: bool
) -> dict[str, tuple[int, ...]]:
    """Shapes without padding of the leaves that a saved checkpoint of this config has."""
    blocks = quantized_params(cfg, with_mtp=with_mtp) if in_blocks else {}
    return leaf_shapes(sources(cfg, with_mtp=with_mtp), blocks)


def _leaves_in_blocks(name: str, dense: ParamDef, blocks: Blocks) -> dict[str, ParamDef]:
    """What a parameter is while it is held in blocks."""
    return {
        f"{name}/weight": ParamDef(blocks.byte_shape(dense.shape), np.uint8, dense.spec),
        f"{name}/scale": ParamDef(
            blocks.scale_shape(dense.shape), np.dtype(blocks.scale_dtype), dense.spec
        ),
    }


def _dequantized(data: Any, scale: Any, blocks: Blocks, leaf: ParamDef, mesh: Mesh) -> jax.Array:
    def dequantize(data, scale):
        return dequantize_blocks(data, scale, blocks.sizes, leaf.dtype, blocks.kind)

    return jax.jit(dequantize, out_shardings=NamedSharding(mesh, leaf.spec))(data, scale)


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no readable {_CONFIG_FILE} ({error})") from error


def _check_extents(
    shapes: Mapping[str, tuple[int, ...]], logical: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises a ValueError unless these are the parameters, each at least as large as its values."""
    odd = sorted(set(shapes) ^ set(logical))
    short = [
        f"{name} {list(shapes[name])} for {list(logical[name])}"
        for name in sorted(set(shapes) & set(logical))
        if len(shapes[name]) != len(logical[name])
        or any(have < want for have, want in zip(shapes[name], logical[name], strict=True))
    ]
    if odd or short:
        raise ValueError(
            f"the parameters are not those of the config: only one of them has {odd[:20]}, too"
            f" small or misshapen are {short[:20]}"
        )
