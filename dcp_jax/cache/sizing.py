"""How many pages fit: by an explicit number of tokens, or by what the backend can really give."""

from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from dcp_jax.cache.pool import CacheSpec
from dcp_jax.dcp.layout import MAX_ROWS, pages_needed

# On CPU there is no device memory to fill: the pools of all ranks together take at most this.
CPU_POOL_BYTES = 2**30


@dataclass(frozen=True)
class Capacity:
    """What the caches hold and cost.

    Attributes:
        tokens: tokens that fit over all ranks.
        pages: pages of `page_tokens` tokens each.
        page_tokens: tokens of one page over all ranks.
        ranks: dcp_size.
        rank_bytes: bytes of each cache ("latent", "index_k") on one rank.
        bytes_per_token: the same, per token that the whole pool holds.
    """

    tokens: int
    pages: int
    page_tokens: int
    ranks: int
    rank_bytes: dict[str, int]
    bytes_per_token: dict[str, float]


def capacity(spec: CacheSpec) -> Capacity:
    """Capacity of a pool, from the very arrays it allocates."""
    rank_bytes = spec.rank_bytes()
    return Capacity(
        tokens=spec.tokens,
        pages=spec.pages,
        page_tokens=spec.page_size * spec.dcp_size,
        ranks=spec.dcp_size,
        rank_bytes=rank_bytes,
        bytes_per_token={name: size / spec.tokens for name, size in rank_bytes.items()},
    )


def size_pool(
    spec: CacheSpec,
    mesh: Mesh,
    *,
    max_total_tokens: int | None,
    mem_fraction_static: float,
    most_useful_pages: int,
) -> CacheSpec:
    """`spec` with as many pages as asked for, or as fit.

    Args:
        spec: sizes; its `pages` are ignored.
        mesh: where the pool will live; weights are loaded already.
        max_total_tokens: tokens over all ranks, or None to fill the memory.
        mem_fraction_static: of a device's memory, for weights and pool together.
        most_useful_pages: more are never allocated.

    Raises:
        ValueError: not even one page fits.
    """
    page = sum(replace(spec, pages=1).rank_bytes().values())
    if max_total_tokens is not None:
        return replace(spec, pages=pages_needed(max_total_tokens, spec.page_size, spec.dcp_size))
    free = _free_bytes(mesh, mem_fraction_static)
    region = spec.page_size * max(
        spec.layers, spec.index_layers * (spec.dcp_size if spec.index_replicated else 1)
    )
    pages = min(free // page, most_useful_pages, MAX_ROWS // region)
    if pages < 1:
        raise ValueError(
            f"mem_fraction_static={mem_fraction_static} leaves {free} bytes on a device for the "
            f"caches, and one page takes {page}: raise it or tp, or lower page_size."
        )
    return replace(spec, pages=int(pages))


def _free_bytes(mesh: Mesh, fraction: float) -> int:
    """Bytes for the pool on the device that has the least."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    if any(not s or "bytes_limit" not in s for s in stats):
        if jax.default_backend() != "cpu":
            raise ValueError(
                "this backend does not report its memory, so the pool cannot be sized: give "
                "max_total_tokens."
            )
        return CPU_POOL_BYTES // mesh.size
    return min(int(s["bytes_limit"] * fraction) - s["bytes_in_use"] for s in stats)
