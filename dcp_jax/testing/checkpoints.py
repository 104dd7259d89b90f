"""Random checkpoints in Hugging Face's layout, for models of any size that have no weights.

Scales are chosen so that a tiny model behaves like a trained one where it matters to tests: scores
of the indexer and of attention are spread out, every expert is chosen now and then, and logits have
a standard deviation of about 2, so greedy tokens do not hang on the last bit.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from dcp_jax.config import ModelConfig
from dcp_jax.weights.mapping import sources
from dcp_jax.weights.safetensors_file import INDEX_FILE, SINGLE_FILE

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Kept in float32 by every released checkpoint, or harmless to keep so.
_FLOAT32 = ("k_norm.weight", "k_norm.bias", "e_score_correction_bias")

# Gain over 1/sqrt(fan_in), by the end of the tensor's name.
_GAINS = {"lm_head.weight": 2.0, "q_b_proj.weight": 2.0, "wq_b.weight": 2.0}


def write_random_checkpoint(
    directory: str | Path,
    config: Mapping[str, Any],
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
) -> Path:
    """Writes `config.json` and safetensors of random weights; the same seed gives the same bytes.

    A tensor's values depend on the seed and its name only, not on the other tensors or `shards`.
    The MTP layer is written when the config has one; shared layers have no indexer.

    Args:
        directory: made if absent.
        config: a config.json as a dict, of any model that `ModelConfig` takes.
        seed: of all tensors.
        dtype: "float32" or "bfloat16", also recorded in the config.
        shards: number of files; more than one makes an index as well.

    Returns:
        The directory.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be written; use one of {', '.join(_DTYPES)}")
    config = {**config, "dtype": dtype}
    tensors = random_tensors(config, seed)
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"shards={shards} must be from 1 to the {len(tensors)} tensors there are")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if shards == 1:
        save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard, names in enumerate(np.array_split(sorted(tensors), shards), start=1):
        file_name = f"model-{shard:05}-of-{shards:05}.safetensors"
        part = {str(name): tensors[str(name)] for name in names}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return directory


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of such a checkpoint by their Hugging Face names, in the config's dtype."""
    cfg = ModelConfig.from_hf(config)
    table = sources(cfg, with_mtp=cfg.num_nextn_predict_layers > 0)
    shapes = {name: source.tensor_shape for source in table.values() for name in source.names}
    return {
        name: _random_tensor(name, shape, seed).astype(
            np.float32 if name.endswith(_FLOAT32) else _DTYPES[cfg.dtype]
        )
        for name, shape in shapes.items()
    }


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    (whole,) = random_rows(name, shape, seed, shape[0])
    return whole


def random_rows(name: str, shape: tuple[int, ...], seed: int, rows: int) -> Iterator[np.ndarray]:
    """A tensor in pieces of `rows` along its first axis; the values do not depend on `rows`.

    Float32: norms near 1, biases small, a unit embedding, matrices scaled by their fan-in.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    centre, spread = random_scale(name, shape)
    for start in range(0, shape[0], rows):
        size = (min(rows, shape[0] - start), *shape[1:])
        yield centre + spread * rng.standard_normal(size, dtype=np.float32)


def random_scale(name: str, shape: tuple[int, ...]) -> tuple[np.float32, np.float32]:
    """Mean and standard deviation of a tensor's values, by its name and shape."""
    gain = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
    centre, spread = 0.0, gain / math.sqrt(shape[-1])
    if name.endswith("bias"):
        spread = 0.1
    elif len(shape) == 1:
        centre, spread = 1.0, 0.1
    elif name.endswith("embed_tokens.weight"):
        spread = 1.0
    return np.float32(centre), np.float32(spread)
