"""Hugging Face directories -> sharded parameters, each device reading only its part.

1. Read the headers of all safetensors files (`Checkpoint`): names, shapes, dtypes.
2. Compare them with what the parameters need (`mapping.sources`); whatever is missing, unexpected,
   misshapen or unreadable goes into one ValueError, before any data is read.
3. Per parameter, `jax.make_array_from_callback`: a device's shard is read by slices into zeros of
   the padded shape, once per distinct shard.

Invariant: a value outside the checkpoint's own range (padding of heads, intermediate sizes,
vocabulary) is zero.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from dcp_jax.config import ModelConfig
from dcp_jax.layers.param import ParamDef
from dcp_jax.weights.mapping import Source, is_ignorable, sources
from dcp_jax.weights.safetensors_file import Checkpoint

READABLE_DTYPES = ("F32", "BF16", "F16")
_NAMES_SHOWN = 20

_Bounds = tuple[tuple[int, int], ...]


def load_hf(
    path: str | Path,
    cfg: ModelConfig,
    defs: Mapping[str, Any],
    mesh: Mesh,
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Loads a Hugging Face directory as the parameters that `defs` describes.

    Args:
        path: directory with `model.safetensors`, or an index and its shards.
        cfg: the config of that checkpoint.
        defs: nested dict of parameter definitions; with a key "mtp" when the MTP layer is wanted.
        mesh: the mesh that the definitions' specs name axes of.
        progress: show a bar of the bytes placed on this process's devices.

    Returns:
        Nested dict like `defs`, of `jax.Array`s sharded over `mesh`.

    Raises:
        ValueError: the files are absent or corrupt, or the checkpoint is not one of this model.
    """
    checkpoint = Checkpoint(path)
    flat = dict(flatten(defs))
    with_mtp = "mtp" in defs
    table = sources(cfg, with_mtp=with_mtp, available=checkpoint)
    check_checkpoint(checkpoint, cfg, table, with_mtp=with_mtp)
    check_defs(flat, {name: source.shape for name, source in table.items()})
    arrays = {}
    total = sum(_local_bytes(spec, mesh) for spec in flat.values())
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress
    ) as bar:
        for name, spec in flat.items():
            arrays[name] = _load_param(checkpoint, table[name], spec, mesh, bar)
    return unflatten(arrays)


def check_checkpoint(
    checkpoint: Checkpoint, cfg: ModelConfig, table: Mapping[str, Source], *, with_mtp: bool
) -> None:
    """Raises one ValueError naming all tensors missing, unexpected, misshapen or unreadable."""
    needed = {name: source.tensor_shape for source in table.values() for name in source.names}
    missing = [name for name in needed if name not in checkpoint]
    present = [name for name in needed if name in checkpoint]
    misshapen = [
        f"{name} is {list(checkpoint[name].shape)}, not {list(needed[name])}"
        for name in present
        if checkpoint[name].shape != needed[name]
    ]
    fp8 = [name for name in present if checkpoint[name].dtype.startswith("F8")]
    unreadable = [
        f"{name} is {checkpoint[name].dtype}"
        for name in present
        if checkpoint[name].dtype not in READABLE_DTYPES and name not in fp8
    ]
    scales = {f"{name}_scale_inv" for name in fp8}
    unexpected = [
        name
        for name in checkpoint
        if name not in needed
        and name not in scales
        and not is_ignorable(name, cfg, with_mtp=with_mtp, names=checkpoint)
    ]
    problems = [
        _listing(f"{len(names)} {what}", names)
        for what, names in (
            ("tensors are missing", missing),
            ("tensors are unexpected", unexpected),
            ("tensors have another shape than the config says", misshapen),
            (f"tensors have a dtype that is none of {', '.join(READABLE_DTYPES)}", unreadable),
            ("tensors are FP8 block weights, not yet read; use the bf16 checkpoint", fp8),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"{checkpoint.directory} is not a checkpoint of this {cfg.model_type} config"
            f" ({cfg.num_hidden_layers} layers{', with MTP' if with_mtp else ''}):\n  "
            + "\n  ".join(problems)
        )


def check_defs(defs: Mapping[str, ParamDef], logical_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError unless `defs` are these parameters, padded on sharded axes at most."""
    odd = sorted(set(defs) ^ set(logical_shapes))
    if odd:
        raise ValueError(_listing("parameters that only one of model and weights has", odd))
    wrong = []
    for name, logical in logical_shapes.items():
        shape, spec = defs[name].shape, tuple(defs[name].spec)
        sharded = [axis is not None for axis in spec] + [False] * (len(shape) - len(spec))
        fits = len(shape) == len(logical) and all(
            have == want or (have > want and may_pad)
            for have, want, may_pad in zip(shape, logical, sharded, strict=True)
        )
        if not fits:
            wrong.append(f"{name} is {list(shape)} for {list(logical)} in the checkpoint")
    if wrong:
        raise ValueError(_listing("parameters that the weights do not fit", wrong))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested dict, the keys of a path joined by "/"."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _load_param(
    checkpoint: Checkpoint, source: Source, spec: ParamDef, mesh: Mesh, bar: tqdm
) -> jax.Array:
    """One parameter on the mesh; replicas of a shard share one host copy, freed on return."""
    host: dict[_Bounds, np.ndarray] = {}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = _bounds(index, spec.shape)
        if bounds not in host:
            host[bounds] = _read_shard(checkpoint, source, bounds, spec.dtype)
            bar.update(host[bounds].nbytes)
        return host[bounds]

    return jax.make_array_from_callback(spec.shape, NamedSharding(mesh, spec.spec), shard)


def _read_shard(checkpoint: Checkpoint, source: Source, bounds: _Bounds, dtype: Any) -> np.ndarray:
    """`padded_parameter[bounds]`: the checkpoint's values, zeros outside their range."""
    out = np.zeros([stop - start for start, stop in bounds], dtype)
    box = [slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, source.shape, strict=True)]
    real = tuple(slice(0, cut.stop - cut.start) for cut in box)
    if out[real].size:
        source.read(checkpoint, box, out[real])
    return out


def _local_bytes(spec: ParamDef, mesh: Mesh) -> int:
    """Bytes of the distinct shards of a parameter on this process's devices."""
    sharding = NamedSharding(mesh, spec.spec)
    indices = sharding.addressable_devices_indices_map(spec.shape).values()
    distinct = {_bounds(index, spec.shape) for index in indices}
    size = math.prod(sharding.shard_shape(spec.shape))
    return len(distinct) * size * np.dtype(spec.dtype).itemsize


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    """(start, stop) of every axis of a device's shard."""
    return tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))


def _listing(what: str, names: list[str]) -> str:
    """`what: a, b, c`, with at most `_NAMES_SHOWN` of the names."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}"
