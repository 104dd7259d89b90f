"""Random weights and cache contents, made on the devices: nothing of their size is on the host.

Scales are those of `testing/checkpoints`: norms near 1, matrices scaled by their fan-in, so that
scores of the indexer and of attention are spread out as in a trained model.
"""

import math
import zlib
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from dcp_jax.cache.pool import CacheSpec, KVCache
from dcp_jax.layers.param import ParamDef
from dcp_jax.mesh import DCP
from pallas_kernels import kv_layout

FILL_ROWS = 16384  # rows of a cache that are drawn at a time, which bounds the temporary memory
_GAINS = {"lm_head": 2.0, "q_b_proj": 2.0, "wq_b": 2.0}


def random_params(defs: dict, mesh: Mesh, seed: int) -> dict:
    """Parameters as `defs` says, each drawn in place by one jitted, sharded program per shape."""
    draw: dict = {}

    def of(path: str, node) -> dict | Array:
        if not isinstance(node, ParamDef):
            return {name: of(f"{path}/{name}", inner) for name, inner in node.items()}
        mean, deviation = _distribution(path, node.shape)
        kind = node.shape, jnp.dtype(node.dtype), node.spec
        if kind not in draw:
            draw[kind] = jax.jit(
                partial(_normal, shape=node.shape, dtype=node.dtype),
                out_shardings=NamedSharding(mesh, node.spec),
            )
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        return draw[kind](key, mean, deviation)

    made = of("", defs)
    assert isinstance(made, dict)
    return made


def _normal(key: PRNGKeyArray, mean, deviation, *, shape: tuple[int, ...], dtype) -> Array:
    values = jax.random.normal(key, shape, dtype)
    return (mean + deviation * values).astype(dtype)


def _distribution(path: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a parameter."""
    name = path.rsplit("/", 1)[-1]
    if "bias" in name:
        return 0.0, 0.1
    if len(shape) == 1:
        return 1.0, 0.1
    if name == "embed":
        return 0.0, 1.0
    fan_in = math.prod(shape[1:]) if name == "o_proj" else shape[-1]
    return 0.0, _GAINS.get(name, 1.0) / math.sqrt(fan_in)


def random_cache(spec: CacheSpec, mesh: Mesh, seed: int) -> KVCache:
    """Caches full of normal latents and keys, in the format of `spec`."""
    local, specs = spec.abstract(), spec.specs()

    def body(key: PRNGKeyArray) -> KVCache:
        mine = jax.random.fold_in(key, jax.lax.axis_index(DCP))
        latent, scale = _fill(mine, local.latent, kv_layout.quantize_latent if spec.fp8 else None)
        k_pe, _ = _fill(jax.random.fold_in(mine, 1), local.k_pe, None)
        # A replicated index has the same keys on every rank.
        keys = jax.random.fold_in(key if spec.index_replicated else mine, 2)
        quantize = kv_layout.quantize_index if spec.fp8 else None
        index_k, index_scale = _fill(keys, local.index_k, quantize)
        return KVCache(latent, scale, k_pe, index_k, index_scale)

    fill = jax.shard_map(
        body, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False
    )
    return jax.jit(fill)(jax.random.key(seed))


def _fill(key: PRNGKeyArray, like: jax.ShapeDtypeStruct, quantize) -> tuple[Array, Array | None]:
    """Rows like `like` (and their scales, if they are quantised), block by block."""
    rows, width = like.shape
    block = min(rows, FILL_ROWS)

    def draw(number):
        values = jax.random.normal(jax.random.fold_in(key, number), (block, width), jnp.float32)
        return values.astype(like.dtype) if quantize is None else quantize(values)

    blocks = jax.lax.map(draw, jnp.arange(-(-rows // block)))
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], blocks)
    return flat if quantize is not None else (flat, None)
