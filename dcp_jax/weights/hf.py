"""Hugging Face directories -> sharded parameters, each device reading only its part.

1. Read the headers of all safetensors files (`Checkpoint`): names, shapes, dtypes.
2. Compare them with what the parameters need (`mapping.sources`); whatever is missing, unexpected,
   misshapen or unreadable goes into one ValueError, before any data is read.
3. Per parameter, every distinct shard on this process's devices is read by slices into zeros of the
   padded shape, in parallel pieces, a few parameters ahead of the one that goes to the devices.

A parameter that `defs` holds in blocks is two leaves, `weight` and `scale`; a quantised tensor that
goes into any other parameter is dequantised.

Invariant: a value outside the checkpoint's own range (padding of heads, intermediate sizes,
vocabulary) is zero.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from dcp_jax.config import ModelConfig
from dcp_jax.layers.param import ParamDef
from dcp_jax.quantization import Blocks
from dcp_jax.weights.blocks import read_blocks, read_values
from dcp_jax.weights.check import check_checkpoint, listing
from dcp_jax.weights.mapping import Source, quantized_params, sources
from dcp_jax.weights.safetensors_file import Checkpoint

# What a thread reads at a time, and what may wait on the host for its way to the devices.
_PIECE_BYTES = 64 * 2**20
_AHEAD_BYTES = 4 * 2**30
_THREADS = max(4, min(32, os.cpu_count() or 1))

_Bounds = tuple[tuple[int, int], ...]
_Task = Callable[[], int]


def load_hf(
    path: str | Path,
    cfg: ModelConfig,
    defs: Mapping[str, Any],
    mesh: Mesh,
    *,
    convert: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Loads a Hugging Face directory as the parameters that `defs` describes.

    Args:
        path: directory with `model.safetensors`, or an index and its shards.
        cfg: the config of that checkpoint.
        defs: nested dict of parameter definitions; with a key "mtp" when the MTP layer is wanted.
        mesh: the mesh that the definitions' specs name axes of.
        convert: float tensors of parameters held in blocks are quantised to e4m3.
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
    blocks = {
        name: size
        for name, size in quantized_params(cfg, with_mtp=with_mtp).items()
        if f"{name}/weight" in flat
    }
    check_checkpoint(checkpoint, cfg, table, blocks, with_mtp=with_mtp, convert=convert)
    check_defs(flat, leaf_shapes(table, blocks))
    loads = [
        _Load(name, [flat[f"{name}/weight"], flat[f"{name}/scale"]], blocks[name])
        if name in blocks
        else _Load(name, [flat[name]])
        for name in table
    ]
    arrays = {}
    with (
        tqdm(
            total=sum(_local_bytes(leaf, mesh) for leaf in flat.values()),
            unit="B",
            unit_scale=True,
            desc="loading weights",
            disable=not progress,
        ) as bar,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        waiting: deque[_Load] = deque()

        def finish_first() -> None:
            load = waiting.popleft()
            for task in load.tasks:
                bar.update(task.result())
            arrays.update(load.arrays(mesh))
            load.free()

        try:
            for load in loads:
                load.start(checkpoint, table[load.name], mesh, pool)
                waiting.append(load)
                while len(waiting) > 1 and sum(one.nbytes for one in waiting) > _AHEAD_BYTES:
                    finish_first()
            while waiting:
                finish_first()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return unflatten({name: arrays[name] for name in flat})


def leaf_shapes(
    table: Mapping[str, Source], blocks: Mapping[str, Blocks]
) -> dict[str, tuple[int, ...]]:
    """Path -> shape without padding of every leaf, two for each parameter in `blocks`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, source in table.items():
        if name in blocks:
            shapes[f"{name}/weight"] = blocks[name].byte_shape(source.shape)
            shapes[f"{name}/scale"] = blocks[name].scale_shape(source.shape)
        else:
            shapes[name] = source.shape
    return shapes


def check_defs(defs: Mapping[str, ParamDef], logical_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError unless `defs` are these parameters, padded on sharded axes at most."""
    odd = sorted(set(defs) ^ set(logical_shapes))
    if odd:
        raise ValueError(listing("parameters that only one of model and weights has", odd))
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
        raise ValueError(listing("parameters that the weights do not fit", wrong))


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


@dataclass
class _Load:
    """One parameter on its way: its leaves, and each distinct shard of them on the host.

    Replicas of a shard share one host copy.
    """

    name: str
    leaves: list[ParamDef]
    blocks: Blocks | None = None
    host: list[dict[_Bounds, np.ndarray]] = field(default_factory=list)
    tasks: list[Future[int]] = field(default_factory=list)

    def start(
        self, checkpoint: Checkpoint, source: Source, mesh: Mesh, pool: ThreadPoolExecutor
    ) -> None:
        """Submit the reading of every shard."""
        self.host = [{} for _ in self.leaves]
        for bounds in zip(*(_distinct_bounds(leaf, mesh) for leaf in self.leaves), strict=True):
            for shards, leaf, at in zip(self.host, self.leaves, bounds, strict=True):
                shards[at] = np.zeros([stop - start for start, stop in at], leaf.dtype)
            outs = [shards[at] for shards, at in zip(self.host, bounds, strict=True)]
            tasks = shard_tasks(checkpoint, source, bounds[0], outs, self.blocks)
            self.tasks += [pool.submit(task) for task in tasks]

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(shard.nbytes for shards in self.host for shard in shards.values())

    def free(self) -> None:
        """Let go of the host's copies (and of what the tasks hold of them)."""
        self.host.clear()
        self.tasks.clear()

    def arrays(self, mesh: Mesh) -> Iterator[tuple[str, jax.Array]]:
        """The leaves on the mesh."""
        names = [f"{self.name}/weight", f"{self.name}/scale"] if self.blocks else [self.name]
        for name, leaf, shards in zip(names, self.leaves, self.host, strict=True):

            def shard(index, leaf=leaf, shards=shards) -> np.ndarray:
                return shards[_bounds(index, leaf.shape)]

            sharding = NamedSharding(mesh, leaf.spec)
            yield name, jax.make_array_from_callback(leaf.shape, sharding, shard)


def shard_tasks(
    checkpoint: Checkpoint,
    source: Source,
    bounds: _Bounds,
    outs: list[np.ndarray],
    blocks: Blocks | None = None,
) -> Iterator[_Task]:
    """Pieces of the reading of one shard; each returns how many bytes it filled, padding included.

    Args:
        checkpoint: what to read from.
        source: of the parameter.
        bounds: of the shard in the padded parameter (in bytes of the weight, if in blocks).
        outs: zeros to fill: the values; or bytes and scales, if in blocks.
        blocks: of the parameter, if it is held in blocks.
    """
    nbytes = sum(out.nbytes for out in outs)
    if blocks is not None:
        *rest, (start, stop) = bounds
        bounds = (*rest, (start * blocks.values_per_byte, stop * blocks.values_per_byte))
    box = [slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, source.shape, strict=True)]
    if any(cut.stop == cut.start for cut in box):
        yield lambda: nbytes
        return
    step = max(1, len(outs[0]) * _PIECE_BYTES // nbytes)
    if blocks is not None:
        step = -(-step // blocks.sizes[0]) * blocks.sizes[0]
    cuts = [slice(at, min(at + step, box[0].stop)) for at in range(box[0].start, box[0].stop, step)]
    for number, cut in enumerate(cuts):
        part = (cut, *box[1:])
        local = tuple(
            slice(c.start - b[0], c.stop - b[0]) for c, b in zip(part, bounds, strict=True)
        )
        filled = nbytes * (number + 1) // len(cuts) - nbytes * number // len(cuts)
        if blocks is None:
            yield partial(_fill_values, filled, source, checkpoint, part, outs[0][local])
        else:
            *rest, last = local
            per_byte = blocks.values_per_byte
            data = outs[0][(*rest, slice(last.start // per_byte, last.stop // per_byte))]
            grid = tuple(
                slice(cut.start // size, -(-cut.stop // size))
                for cut, size in zip(local, blocks.sizes, strict=True)
            )
            yield partial(_fill_blocks, filled, source, checkpoint, part, data, outs[1][grid])


def _fill_values(filled: int, *args) -> int:
    read_values(*args)
    return filled


def _fill_blocks(filled: int, *args) -> int:
    read_blocks(*args)
    return filled


def _distinct_bounds(spec: ParamDef, mesh: Mesh) -> list[_Bounds]:
    """Bounds of the distinct shards on this process's devices, in the order of the devices."""
    indices = NamedSharding(mesh, spec.spec).addressable_devices_indices_map(spec.shape)
    return list(dict.fromkeys(_bounds(index, spec.shape) for index in indices.values()))


def _local_bytes(spec: ParamDef, mesh: Mesh) -> int:
    """Bytes of the distinct shards of a parameter on this process's devices."""
    size = math.prod(NamedSharding(mesh, spec.spec).shard_shape(spec.shape))
    return len(_distinct_bounds(spec, mesh)) * size * np.dtype(spec.dtype).itemsize


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Bounds:
    """(start, stop) of every axis of a device's shard."""
    return tuple(cut.indices(size)[:2] for cut, size in zip(index or (), shape, strict=True))
