"""Areas of the self-check about places and bytes: index arithmetic and the formats of the caches.

Compared with loops over Python integers and with numpy, written out here.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dcp_jax.dcp import layout, step
from dcp_jax.selfcheck import (
    DCP_SIZES,
    EXACT,
    FLOAT32,
    Outcome,
    compiled,
    distance,
    measure,
    unequal,
)
from pallas_kernels import kv_layout


def layout_checks() -> Iterator[Outcome]:
    """Who owns a token and where, against loops over Python integers."""
    n = 100

    def arithmetic(size: int) -> float:
        slots = np.arange(-2, n)
        owners, rows = layout.owner(slots, size), layout.row(slots, size)
        wrong = unequal(owners, [s % size if s >= 0 else -1 for s in slots])
        wrong += unequal(layout.slot(owners, rows, size), np.maximum(slots, -1))
        for length in (0, 1, size - 1, size, size + 1, n):
            counts = [sum(p % size == r for p in range(length)) for r in range(size)]
            wrong += unequal([layout.local_length(length, r, size) for r in range(size)], counts)
        return wrong

    def localised(size: int) -> float:
        page_size = 2
        batch = step.Batch(
            tokens=np.zeros((3, 5), np.int32),
            starts=np.array([0, 3, 0], np.int32),
            lengths=np.array([5, 4, 0], np.int32),
            page_table=np.array([[4, 1, 3], [0, 5, 2], [-1, -1, -1]], np.int32),
        )
        localise = jax.jit(lambda batch, rank: step.make_step(batch, page_size, rank, size))
        wrong = 0.0
        for rank in range(size):
            mine = localise(batch, jnp.int32(rank))
            rows, visible = np.full((3, 5), -1), np.zeros((3, 5), int)
            for b, t in np.ndindex(3, 5):
                position, width = batch.starts[b] + t, page_size * size
                if t < batch.lengths[b]:
                    visible[b, t] = len(range(rank, position + 1, size))
                    if position % size == rank and position // width < 3:
                        page = batch.page_table[b, position // width]
                        rows[b, t] = page * page_size + position % width // size
            wrong += unequal((mine.write_rows, mine.local_visible), (rows, visible))
        return wrong

    for size in (*DCP_SIZES, 3):
        yield measure(
            "layout", f"owner, row, slot, lengths, W={size}", EXACT, partial(arithmetic, size)
        )
        yield measure("layout", f"rows of a batch, W={size}", EXACT, partial(localised, size))


def format_checks() -> Iterator[Outcome]:
    """Quantised rows against numpy, the published byte formats there and back, dropped writes."""
    rng = np.random.default_rng(4)
    x = (
        rng.standard_normal((6, 128)).astype(np.float32)
        * np.array([[1e-3, 1, 50, 1, 1, 1e4]], np.float32).T
    )
    x[3], x[4, 7] = 0, np.inf

    def latent():
        values, scale = compiled(kv_layout.quantize_latent, x)
        finite = np.minimum(np.abs(x), np.finfo(np.float32).max)
        want_scale = finite.max(-1, keepdims=True) / np.float32(448)
        scaled = np.clip(x / np.where(want_scale == 0, 1, want_scale), -448, 448)
        want = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * want_scale
        got = compiled(kv_layout.dequantize, values, scale, dtype=jnp.float32)
        return distance(got[:4], want[:4]) + distance(scale, want_scale)

    def index():
        values, scale = compiled(kv_layout.quantize_index, x[:3])
        power = np.log2(np.asarray(scale, np.float64))
        back = np.asarray(values).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        error = np.abs(back * np.asarray(scale)[:, None] - x[:3]).max(-1)
        return np.abs(power - power.round()).max() + (error / np.abs(x[:3]).max(-1)).max()

    def packed():
        def there_and_back(x):
            row = *kv_layout.quantize_latent(x), x[:, :8].astype(jnp.bfloat16)
            page = kv_layout.quantize_index(x)
            again = kv_layout.unpack_latent_656(kv_layout.pack_latent_656(*row), 128)
            again += kv_layout.unpack_index_page(kv_layout.pack_index_page(*page), 4)
            return row + page, again

        return unequal(*compiled(there_and_back, x[:4]))

    def written():
        pool, values = (
            np.zeros((5, 2), np.float32),
            np.full((4, 2), [[1], [2], [3], [4]], np.float32),
        )
        want = pool.copy()
        want[3], want[0] = 1, 4
        rows = np.array([3, -1, 5, 0], np.int32)
        return unequal(compiled(kv_layout.write_rows, pool, values, rows), want)

    def rotated():
        once = np.asarray(compiled(kv_layout.hadamard, x[:3]))
        norms = np.linalg.norm(once, axis=-1), np.linalg.norm(x[:3], axis=-1)
        return distance(compiled(kv_layout.hadamard, once), x[:3]) + distance(*norms)

    yield measure("formats", "latent rows in e4m3", FLOAT32, latent)
    yield measure("formats", "index rows in e4m3", 2.0**-4, index)
    yield measure("formats", "bytes packed and unpacked", EXACT, packed)
    yield measure("formats", "writes that must be dropped", EXACT, written)
    yield measure("formats", "hadamard", FLOAT32, rotated)
