"""Cache rows: byte-exact formats, clamping, and writes that drop what isn't mine."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import kv_layout


def bf16(array):
    return jnp.asarray(array).view(jnp.bfloat16)


def run(fn, jit):
    return jax.jit(fn) if jit else fn


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_act_quant_bytes(golden_quant, ue8m0, jit):
    values, scale = run(lambda x: kv_layout.act_quant(x, ue8m0=ue8m0), jit)(
        bf16(golden_quant["act_x_bf16"])
    )
    name = "act_ue8m0" if ue8m0 else "act_f32"
    assert np.array_equal(scale, golden_quant[f"{name}_scale"])
    assert np.array_equal(values, golden_quant[f"{name}_fp8"])


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_latent_row_656_bytes(golden_quant, jit):
    latent, k_pe = bf16(golden_quant["kv_latent_bf16"]), bf16(golden_quant["kv_rope_bf16"])
    packed = run(lambda c, r: kv_layout.pack_latent_656(*kv_layout.quantize_latent(c), r), jit)(
        latent, k_pe
    )
    assert packed.shape[-1] == 656
    assert np.array_equal(packed, golden_quant["kv_packed_656"])
    values, scale, rope = kv_layout.unpack_latent_656(jnp.asarray(golden_quant["kv_packed_656"]))
    assert np.array_equal(rope, k_pe)
    dequantized = kv_layout.dequantize(values, scale, jnp.bfloat16)
    assert np.array_equal(
        np.asarray(dequantized).view(np.uint16), golden_quant["kv_dequant_latent_bf16"]
    )


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", ["q", "k"])
def test_index_rows_hadamard_and_bytes(golden_quant, name, jit):
    rotated = run(kv_layout.hadamard, jit)(bf16(golden_quant[f"idx_{name}_bf16"]))
    assert np.array_equal(
        np.asarray(rotated).view(np.uint16), golden_quant[f"idx_{name}_hadamard_bf16"]
    )
    values, scale = run(kv_layout.quantize_index, jit)(rotated)
    assert np.array_equal(values, golden_quant[f"idx_{name}_fp8"])
    assert np.array_equal(scale, golden_quant[f"idx_{name}_scale"][..., 0])


def test_index_page_8448_bytes(golden_quant):
    values, scale = np.zeros((64, 128), np.uint8), np.zeros(64, np.float32)
    values[:40], scale[:40] = golden_quant["idx_k_fp8"], golden_quant["idx_k_scale"][:, 0]
    packed = kv_layout.pack_index_page(jnp.asarray(values), jnp.asarray(scale))
    assert np.array_equal(packed, golden_quant["idx_k_page64"])
    got_values, got_scale = kv_layout.unpack_index_page(packed)
    assert np.array_equal(got_values, values)
    assert np.array_equal(got_scale, scale)


def test_other_sizes_round_trip():
    rng = np.random.default_rng(0)
    latent = jnp.asarray(rng.standard_normal((2, 3, 200)), jnp.float32)
    k_pe = jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.bfloat16)
    values, scale = kv_layout.quantize_latent(latent)
    assert values.shape == (2, 3, 200)
    assert scale.shape == (2, 3, 2)
    packed = kv_layout.pack_latent_656(values, scale, k_pe)
    assert packed.shape == (2, 3, 200 + 8 + 16)
    for got, sent in zip(
        kv_layout.unpack_latent_656(packed, 200), (values, scale, k_pe), strict=True
    ):
        assert np.array_equal(got, sent)
    error = np.abs(kv_layout.dequantize(values, scale, jnp.float32) - latent)
    assert (error <= np.repeat(scale, 128, -1)[..., :200] * 16.001).all()
    page = jnp.asarray(rng.integers(0, 255, (5, 4, 32)), jnp.uint8)
    scales = jnp.asarray(rng.random((5, 4)), jnp.float32)
    packed = kv_layout.pack_index_page(page, scales)
    assert packed.shape == (5, 4 * 36)
    for got, sent in zip(kv_layout.unpack_index_page(packed, 4), (page, scales), strict=True):
        assert np.array_equal(got, sent)


def test_quantize_latent_divides_exactly():
    """One tile a row: XLA would multiply by a reciprocal, and a byte in a few thousand would
    differ.
    """
    x = np.random.default_rng(0).standard_normal((400, 128)).astype(np.float32)
    quantize = jax.jit(kv_layout.quantize_latent)
    values, scale = quantize(jnp.asarray(x))
    expected = np.abs(x).max(axis=-1, keepdims=True) / np.float32(448)
    assert np.array_equal(scale, expected)
    e4m3 = (x / expected).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(values, e4m3.view(np.uint8))
    alone = [quantize(jnp.asarray(row)) for row in x[:20]]
    assert np.array_equal(np.stack([v for v, _ in alone]), e4m3.view(np.uint8)[:20])


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 1000.0, 3.4e38, float("inf")])
def test_large_values_clamp_and_never_become_nan(value):
    x = jnp.zeros((2, 128)).at[0, 3].set(value).at[1, 5].set(-value).at[0, 9].set(1.0)
    for quantize in (
        kv_layout.quantize_latent,
        kv_layout.quantize_index,
        lambda x: kv_layout.act_quant(x, ue8m0=True),
        lambda x: kv_layout.act_quant(x, ue8m0=False),
    ):
        values, scale = quantize(x)
        decoded = np.asarray(values).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert np.isfinite(decoded).all()
        assert np.isfinite(scale).all()
        assert decoded[0, 3] == -decoded[1, 5] > 200


def test_zero_rows_are_zero():
    for quantize in (kv_layout.quantize_latent, lambda x: kv_layout.act_quant(x, ue8m0=True)):
        values, scale = quantize(jnp.zeros((3, 256)))
        assert np.array_equal(kv_layout.dequantize(values, scale, jnp.float32), np.zeros((3, 256)))


def test_ue8m0_scales_are_powers_of_two_and_exact_powers_stay():
    x = jnp.zeros((4, 128)).at[:, 0].set(jnp.array([448.0, 448.1, 1.0, 7.0]))
    _, scale = kv_layout.quantize_index(x)
    assert scale.tolist() == [1.0, 2.0, 2.0**-8, 2.0**-6]


def test_hadamard_is_orthogonal_and_refuses_other_sizes():
    for dim in (1, 2, 32, 128):
        matrix = np.asarray(kv_layout.hadamard(jnp.eye(dim)))
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-6)
        np.testing.assert_allclose(np.abs(matrix), dim**-0.5, rtol=1e-6)
    with pytest.raises(ValueError, match="index_head_dim=96"):
        kv_layout.hadamard(jnp.zeros((2, 96)))
    with pytest.raises(ValueError, match="index_head_dim=256"):
        kv_layout.quantize_index(jnp.zeros((2, 256)))


@pytest.mark.parametrize("width", [None, 3], ids=["scales", "rows"])
def test_write_rows_drops_what_is_not_mine(width):
    shape = (5,) if width is None else (5, width)
    pool = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    rows = jnp.array([[1, 5], [-1, 3]], jnp.int32)  # 5 is the pool's length
    values = -jnp.ones((2, 2, *shape[1:]))
    written = jax.jit(kv_layout.write_rows, donate_argnums=0)(pool + 0, values, rows)
    expected = np.asarray(pool).copy()
    expected[[1, 3]] = -1
    assert np.array_equal(written, expected)
