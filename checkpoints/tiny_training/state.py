"""The training state on disk: a few files below 15 MiB, replaced as one.

The numbers are written byte plane by byte plane (all first bytes, then all second bytes, ..), which
compresses the exponents, and cut into parts. `state.json` names the parts and says how far training
is; it is replaced last, so a run that dies while saving leaves the state before.
"""

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tiny_training.optimiser import TrainState

STATE_FILE = "state.json"
_PART_BYTES = 12 * 2**20
_PLANES = 7  # three of the parameters (the fourth byte is zero), two of each moment


def save_state(directory: str | Path, state: TrainState, progress: dict[str, Any]) -> None:
    """Write the state and `progress`, anything that JSON holds."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    planes = [zlib.compress(plane, level=1) for plane in _planes(jax.device_get(state))]
    data = b"".join(planes)
    parts = []
    for number, start in enumerate(range(0, len(data), _PART_BYTES)):
        parts.append(f"state-{int(state.count)}.{number}")
        _replace(directory / parts[-1], data[start : start + _PART_BYTES])
    described = {
        "count": int(state.count),
        "parts": parts,
        "planes": [len(plane) for plane in planes],
        "crc32": zlib.crc32(data),
        "progress": progress,
    }
    _replace(directory / STATE_FILE, json.dumps(described, indent=1).encode())
    for old in directory.glob("state-*"):
        if old.name not in parts:
            old.unlink()


def load_state(
    directory: str | Path, template: TrainState
) -> tuple[TrainState, dict[str, Any]] | None:
    """The state, and the progress saved with it; None if none was ever saved.

    Args:
        directory: where `save_state` wrote to.
        template: a state of the same shapes.

    Raises:
        ValueError: parts are missing or broken, or belong to a model of another size.
    """
    directory = Path(directory)
    if not (directory / STATE_FILE).exists():
        return None
    described = json.loads((directory / STATE_FILE).read_text())
    missing = [name for name in described["parts"] if not (directory / name).exists()]
    if missing:
        raise ValueError(f"{directory} lacks {missing}, parts of its state: copy them all.")
    data = b"".join((directory / name).read_bytes() for name in described["parts"])
    if zlib.crc32(data) != described["crc32"]:
        raise ValueError(
            f"the state in {directory} is damaged: its checksum differs; copy it anew."
        )
    ends = np.cumsum(described["planes"])
    planes = [
        np.frombuffer(zlib.decompress(data[end - size : end]), np.uint8)
        for end, size in zip(ends, described["planes"], strict=True)
    ]
    leaves, structure = jax.tree.flatten(template.params)
    size = sum(leaf.size for leaf in leaves)
    if {len(plane) for plane in planes} != {size}:
        raise ValueError(
            f"the state in {directory} has {len(planes[0]):,} parameters, the model {size:,}: "
            "it is another model's; train in an empty directory."
        )
    words = np.zeros((size, 4), np.uint8)
    for i in range(3):
        words[:, i + 1] = planes[i]
    vectors = [words.view(np.float32)[:, 0]]
    for first in (3, 5):
        pairs = np.stack(planes[first : first + 2], axis=-1)
        vectors.append(pairs.view(ml_dtypes.bfloat16)[:, 0])
    bounds = np.cumsum([leaf.size for leaf in leaves])[:-1]
    trees = []
    for vector in vectors:
        pieces = np.split(vector, bounds)
        shaped = [jnp.asarray(p.reshape(x.shape)) for p, x in zip(pieces, leaves, strict=True)]
        trees.append(jax.tree.unflatten(structure, shaped))
    return TrainState(*trees, jnp.int32(described["count"])), described["progress"]


def _planes(state: TrainState) -> Iterator[bytes]:
    """The bytes of all parameters by place (little-endian, without the lowest), then of moments."""
    for tree, skip in ((state.params, 1), (state.mean, 0), (state.square, 0)):
        vector = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])
        table = vector.view(np.uint8).reshape(len(vector), -1)
        for place in range(skip, table.shape[1]):
            yield table[:, place].tobytes()


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    os.replace(temporary, path)
