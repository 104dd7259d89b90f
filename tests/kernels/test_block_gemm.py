"""Block-quantised weights: bytes and scales to values, bit for bit, and products with them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import kv_layout, reference
from pallas_kernels.block_format import E2M1, dequantize_blocks
from pallas_kernels.block_gemm import block_gemm


def run(fn, jit):
    return jax.jit(fn) if jit else fn


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_golden_weights_bit_for_bit(golden_quant, jit):
    """320 x 200 in blocks of 128 x 128: ragged both ways."""
    weight, scale = (jnp.asarray(golden_quant[name]) for name in ("w_fp8", "w_scale_inv"))
    got = run(lambda w, s: dequantize_blocks(w, s, (128, 128), jnp.bfloat16), jit)(weight, scale)
    assert np.array_equal(np.asarray(got).view(np.uint16), golden_quant["w_dequant_bf16"])


def test_every_byte_of_both_kinds():
    every = np.arange(256, dtype=np.uint8)[None]
    e4m3 = dequantize_blocks(jnp.asarray(every), jnp.ones((1, 1)), (1, 256), jnp.float32)
    assert np.array_equal(
        e4m3, every.view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True
    )
    ones = jnp.full((1, 16), 127, jnp.uint8)
    pairs = dequantize_blocks(jnp.asarray(every), ones, (1, 32), jnp.float32, "mxfp4")[0]
    assert np.array_equal(pairs[::2], E2M1[every[0] & 15])
    assert np.array_equal(pairs[1::2], E2M1[every[0] >> 4])
    assert np.array_equal(
        E2M1, np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )
    exponents = jnp.arange(1, 255, dtype=jnp.uint8)[:, None]
    two = jnp.full((254, 16), 0x22, jnp.uint8)  # pairs of 1.0
    scaled = dequantize_blocks(two, exponents, (1, 32), jnp.float32, "mxfp4")
    assert np.array_equal(np.asarray(scaled)[:, 0], 2.0 ** (np.arange(1, 255) - 127.0))


@dataclass(frozen=True)
class Case:
    id: str
    out: int
    width: int
    block: tuple[int, int] = (128, 128)
    kind: str = "e4m3"
    tile: int = 2**22


CASES = [
    Case("one-block", 128, 128),
    Case("ragged", 320, 200),
    Case("less-than-a-block", 24, 40),
    Case("tiles-and-a-rest", 700, 256, tile=128 * 256),
    Case("whole-tiles", 512, 200, tile=256 * 200),
    Case("small-blocks", 192, 256, (64, 64)),
    Case("rows-of-heads", 120, 256, (8, 128), tile=2**13),
    Case("mxfp4", 96, 256, (1, 32), "mxfp4"),
    Case("mxfp4-tiles", 100, 64, (1, 32), "mxfp4", tile=32 * 64),
]


def weights(case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    grid = [-(-n // b) for n, b in zip((case.out, case.width), case.block, strict=True)]
    if case.kind == "mxfp4":
        data = rng.integers(0, 256, (case.out, case.width // 2), np.uint8)
        return jnp.asarray(data), jnp.asarray(rng.integers(120, 130, grid), jnp.uint8)
    values = rng.normal(size=(case.out, case.width)) * 100
    data = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return jnp.asarray(data), jnp.asarray(rng.uniform(1e-4, 1e-3, grid), jnp.float32)


NARROW = ("ragged", "tiles-and-a-rest", "mxfp4")
DYNAMIC = ("ragged", "less-than-a-block", "small-blocks", "rows-of-heads")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(pytest.param(c, jnp.float32, id=c.id) for c in CASES),
        *(pytest.param(c, jnp.bfloat16, id=f"{c.id}-bf16") for c in CASES if c.id in NARROW),
    ],
)
def test_products_by_tiles(case, dtype):
    data, scale = weights(case)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, case.width)), dtype)
    got = block_gemm(x, data, scale, block=case.block, kind=case.kind, tile=case.tile)
    want = reference.block_gemm(x, data, scale, block=case.block, kind=case.kind)
    assert got.dtype == jnp.float32
    # In bfloat16 each weight is rounded before it is multiplied: 2^-9 of it at most.
    rounding = 1e-5 if dtype == jnp.float32 else 2**-9
    weight = reference.dequantize_blocks(data, scale, case.block, case.kind)
    bound = rounding * (jnp.abs(x.astype(jnp.float32)) @ jnp.abs(weight).T)
    assert (np.abs(got - want) <= bound).all()


@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES if c.id in DYNAMIC])
def test_dynamic_activations_are_products_of_what_was_quantised(case, scales):
    """Equal, up to the order of sums, to the exact product of both dequantised operands."""
    data, scale = weights(case)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, case.width)), jnp.bfloat16)
    got = block_gemm(x, data, scale, block=case.block, activations=scales)
    values, factors = kv_layout.act_quant(x, ue8m0=scales == "ue8m0")
    dequantised = kv_layout.dequantize(values, factors, jnp.float32)
    want = reference.block_gemm(dequantised, data, scale, block=case.block)
    size = jnp.abs(dequantised) @ jnp.abs(reference.dequantize_blocks(data, scale, case.block)).T
    assert (np.abs(got - want) <= 1e-6 * size).all()
    # e4m3 has 4 significant bits: 6 % of an activation at most, far less of a sum of many.
    exact = reference.block_gemm(x, data, scale, block=case.block)
    assert np.sqrt(np.mean((got - exact) ** 2) / np.mean(np.square(exact))) < 0.05


def test_what_cannot_be_multiplied_is_refused():
    data, scale = weights(CASES[-2])
    x = jnp.ones((1, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="activations='ue8m0' multiplies e4m3 by e4m3"):
        block_gemm(x, data, scale, block=(1, 32), kind="mxfp4", activations="ue8m0")
    with pytest.raises(NotImplementedError, match="implementation='triton' does not exist"):
        block_gemm(x, data, scale, block=(1, 32), kind="mxfp4", implementation="triton")


def test_the_whole_weight_is_never_dequantised():
    """Temporary memory is a tile's, not the weight's."""
    case = Case("large", 4096, 512, tile=256 * 512)
    data, scale = weights(case)
    x = jnp.ones((2, 512), jnp.bfloat16)

    def product(x, data, scale):
        return block_gemm(x, data, scale, tile=case.tile)

    memory = jax.jit(product).lower(x, data, scale).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * case.tile * 3 < 2 * data.size
