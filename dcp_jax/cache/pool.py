"""The device side of the paged caches: one flat array per kind over all layers.

A pool over n layers of `rows` rows each is one array [n * rows, dim]; layer i's region starts at
row i * rows. Few leaves keep dispatch cheap, and a donated flat array is updated in place.

    latent    kv_lora_rank values a row: float32, bfloat16 or e4m3 bytes
    scale     float32 per 128 latent channels, e4m3 only
    k_pe      rotated shared key, the latent's float dtype (bfloat16 beside e4m3)
    index_k   index_head_dim values a row of a *full* layer, index_scale its e4m3 scale
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

from dcp_jax.config import ModelConfig
from dcp_jax.dcp import layout
from dcp_jax.mesh import DCP
from pallas_kernels import kv_layout
from pallas_kernels.sparse_mla import LatentPool

# A leaf of a pytree that also carries shapes and shardings: an array, or what describes one.
Leaf = Any

KV_DTYPES = ("float32", "bfloat16", "fp8_e4m3")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Both caches of all layers; inside `shard_map`, this rank's rows of them.

    Attributes:
        latent: [layers * rows, kv_lora_rank].
        scale: float32 [layers * rows, ceil(kv_lora_rank / 128)], e4m3 only.
        k_pe: [layers * rows, qk_rope_head_dim].
        index_k: [index_layers * index_rows, index_head_dim].
        index_scale: float32 [index_layers * index_rows], e4m3 only.
    """

    latent: Leaf
    scale: Leaf | None
    k_pe: Leaf
    index_k: Leaf
    index_scale: Leaf | None

    @property
    def latent_pool(self) -> LatentPool:
        """The latent cache as the kernels take it."""
        return LatentPool(self.latent, self.scale, self.k_pe)


@dataclass(frozen=True)
class CacheSpec:
    """Sizes of the caches of one model on one mesh.

    Attributes:
        pages: pages in the pool (each `page_size` rows on every rank).
        page_size: rows per page and rank.
        dcp_size: ranks that the pages are spread over.
        layers: layers with a latent cache, the MTP layer included when it runs.
        index_layers: layers with an indexer of their own.
        kv_dtype: what both caches store.
        index_replicated: every rank holds the index K of all tokens.
    """

    pages: int
    page_size: int
    dcp_size: int
    layers: int
    index_layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    index_head_dim: int
    kv_dtype: Literal["float32", "bfloat16", "fp8_e4m3"]
    index_replicated: bool = False

    @classmethod
    def of(cls, cfg: ModelConfig, *, with_mtp: bool = False, **sizes) -> "CacheSpec":
        """Cache sizes for `cfg`; the MTP layer's rows come after the main layers'."""
        mtp = cfg.num_nextn_predict_layers if with_mtp else 0
        return cls(
            layers=cfg.num_hidden_layers + mtp,
            index_layers=len(cfg.full_layers) + mtp,
            kv_lora_rank=cfg.kv_lora_rank,
            qk_rope_head_dim=cfg.qk_rope_head_dim,
            index_head_dim=cfg.index_head_dim,
            **sizes,
        )

    def __post_init__(self):
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_cache_dtype={self.kv_dtype!r} is not stored by this cache: use one of "
                f"{KV_DTYPES}."
            )
        dim = self.index_head_dim
        if self.fp8 and (dim > kv_layout.BLOCK or dim & (dim - 1)):
            raise ValueError(
                f"kv_cache_dtype='fp8_e4m3' with index_head_dim={dim} is not supported: index keys "
                f"are rotated by a Hadamard matrix, a power of two of at most {kv_layout.BLOCK}; "
                "use bf16."
            )
        if self.pages < 1 or self.page_size < 1:
            raise ValueError(
                f"A pool of {self.pages} pages of {self.page_size} rows holds nothing: give at "
                "least one page of one row."
            )
        layout.check_pool(self.layers * self.rows)
        layout.check_pool(self.index_layers * self.index_rows)

    @property
    def rows(self) -> int:
        """Latent rows per layer and rank."""
        return self.pages * self.page_size

    @property
    def index_rows(self) -> int:
        """Index K rows per full layer and rank."""
        return self.rows * (self.dcp_size if self.index_replicated else 1)

    @property
    def index_page_size(self) -> int:
        """Rows of index K per page: a replicated index is one rank's layout with wide pages."""
        return self.page_size * (self.dcp_size if self.index_replicated else 1)

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds over all ranks."""
        return self.rows * self.dcp_size

    @property
    def fp8(self) -> bool:
        """Whether rows are e4m3 bytes with scales."""
        return self.kv_dtype == "fp8_e4m3"

    def abstract(self) -> KVCache:
        """Shape and dtype of one rank's arrays."""
        latent_rows, index_rows = self.layers * self.rows, self.index_layers * self.index_rows
        floats = jnp.bfloat16 if self.fp8 else jnp.dtype(self.kv_dtype)
        stored = jnp.uint8 if self.fp8 else floats
        blocks = -(-self.kv_lora_rank // kv_layout.BLOCK)
        array = jax.ShapeDtypeStruct
        return KVCache(
            latent=array((latent_rows, self.kv_lora_rank), stored),
            scale=array((latent_rows, blocks), jnp.float32) if self.fp8 else None,
            k_pe=array((latent_rows, self.qk_rope_head_dim), floats),
            index_k=array((index_rows, self.index_head_dim), stored),
            index_scale=array((index_rows,), jnp.float32) if self.fp8 else None,
        )

    def specs(self) -> KVCache:
        """Sharding of each array: rows over `dcp`, whole on every rank if replicated."""
        rows = PartitionSpec(DCP)
        index = PartitionSpec() if self.index_replicated else rows
        scaled = rows if self.fp8 else None
        return KVCache(rows, scaled, rows, index, index if self.fp8 else None)

    def rank_bytes(self) -> dict[str, int]:
        """Bytes of each cache on one rank."""
        sizes = {}
        for name, leaves in (
            ("latent", ("latent", "scale", "k_pe")),
            ("index_k", ("index_k", "index_scale")),
        ):
            arrays = [a for leaf in leaves if (a := getattr(self.abstract(), leaf)) is not None]
            sizes[name] = sum(a.size * a.dtype.itemsize for a in arrays)
        return sizes


def init_cache(spec: CacheSpec, mesh: Mesh) -> KVCache:
    """Zeroed caches on `mesh`; global arrays are the ranks' arrays one after the other."""

    def zeros(local: jax.ShapeDtypeStruct, part: PartitionSpec) -> jax.Array:
        ranks = spec.dcp_size if part else 1
        shape = (local.shape[0] * ranks, *local.shape[1:])
        return jnp.zeros(shape, local.dtype, device=NamedSharding(mesh, part))

    return jax.tree.map(zeros, spec.abstract(), spec.specs())


def write_latent(
    cache: KVCache,
    rows: Int[Array, "B T"],
    kv_c: Float[Array, "B T C"],
    k_pe: Float[Array, "B T R"],
) -> KVCache:
    """Store latents and rotated keys at `rows` of the flat pool (its length drops the token)."""
    flat = rows.reshape(-1)
    scale = cache.scale
    if scale is not None:
        kv_c, tile_scale = kv_layout.quantize_latent(kv_c)
        scale = _write(scale, flat, tile_scale)
    return replace(
        cache,
        latent=_write(cache.latent, flat, kv_c),
        scale=scale,
        k_pe=_write(cache.k_pe, flat, k_pe),
    )


def write_index(
    cache: KVCache,
    rows: Int[Array, "B T"],
    k: Float[Array, "B T D"] | UInt8[Array, "B T D"],
    scale: Float[Array, "B T"] | None,
) -> KVCache:
    """Store index keys (already quantised if the cache is) at `rows` of the flat index pool."""
    flat = rows.reshape(-1)
    index_scale = cache.index_scale
    if index_scale is not None:
        assert scale is not None, "an e4m3 cache takes quantised keys"
        index_scale = kv_layout.write_rows(index_scale, scale.reshape(-1), flat)
    return replace(cache, index_k=_write(cache.index_k, flat, k), index_scale=index_scale)


def _write(pool: Array, rows: Array, values: Array) -> Array:
    """Scatter [B, T, D] values into the pool at the flattened rows."""
    return kv_layout.write_rows(pool, values.reshape(-1, values.shape[-1]).astype(pool.dtype), rows)
