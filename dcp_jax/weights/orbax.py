"""Orbax directories: parameters saved from one mesh and restored, already sharded, onto another.

Layout of a directory: `params/` (an Orbax checkpoint of the nested dict), `config.json` (the
Hugging Face config) and, when saved from a Hugging Face directory, its tokenizer files: `LLM` takes
either kind of directory.

Arrays are saved as they lie in memory, padding included, and restored with the padding of the
target: a zero tail is cut or grown, which is right because every value outside the logical shape
is zero. The logical shapes follow from the config; a restored definition that would cut real values
is refused. Every process reads only its own shards.
"""

import json
import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import v1 as ocp

from dcp_jax.config import ModelConfig
from dcp_jax.weights.hf import check_defs, flatten, unflatten
from dcp_jax.weights.mapping import sources

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
    if (path / PARAMS_DIRECTORY).exists():
        raise ValueError(f"{path} already holds an Orbax checkpoint; save to another directory")
    if isinstance(config, Mapping):
        source, raw = None, dict(config)
    else:
        source, raw = Path(config), _read_config(Path(config))
    cfg = ModelConfig.from_hf(raw)
    flat = dict(flatten(params))
    table = sources(cfg, with_mtp="mtp" in params)
    _check_extents(
        {name: array.shape for name, array in flat.items()},
        {name: source.shape for name, source in table.items()},
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

    A saved MTP layer is left alone when `defs` has none.

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
    table = sources(cfg, with_mtp="mtp" in defs)
    logical = {name: source.shape for name, source in table.items()}
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
    return unflatten({name: restored[name] for name in flat})


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
