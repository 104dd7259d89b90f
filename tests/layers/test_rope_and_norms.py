"""RoPE and norms against numpy and the reference's own frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest

from dcp_jax.config import ModelConfig
from dcp_jax.layers.norms import layer_norm, rms_norm
from dcp_jax.layers.rope import apply_rope, inverse_frequencies, rope_table


@pytest.mark.parametrize("case", ["p1", "p2", "p3", "p4"])
def test_frequencies_and_scales_of_the_reference(case, golden):
    """p2 has YaRN: blended frequencies, and the mscale in the softmax scale."""
    case = golden(case)
    cfg = ModelConfig.from_hf(case.path)
    got = inverse_frequencies(cfg.rope, cfg.qk_rope_head_dim)
    np.testing.assert_allclose(got, case.meta["inv_freq"], rtol=1e-6)
    assert cfg.softmax_scale == pytest.approx(case.meta["attn_scaling"], rel=1e-6)
    assert cfg.rope.attention_factor == pytest.approx(case.meta["rope_attention_scaling"])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_rotation_of_pairs(interleaved, heads, golden):
    cfg = ModelConfig.from_hf(golden("p1").path)
    dim = 8
    positions = np.array([[0, 1, 7, 511]])
    x = np.random.default_rng(0).normal(size=(1, 4, *heads, dim)).astype(np.float32)
    table = rope_table(cfg.rope, dim, jnp.asarray(positions))
    got = apply_rope(jnp.asarray(x), table, interleaved=interleaved)
    angle = positions[..., None] * inverse_frequencies(cfg.rope, dim).astype(np.float64)
    rotated = np.exp(1j * angle.reshape(1, 4, *(1 for _ in heads), dim // 2))
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (
            slice(0, dim // 2),
            slice(dim // 2, None),
        )
    )
    turned = (x[..., first] + 1j * x[..., second]) * rotated
    np.testing.assert_allclose(got[..., first], turned.real, atol=1e-4)
    np.testing.assert_allclose(got[..., second], turned.imag, atol=1e-4)


def test_norms_in_float32_whatever_the_input():
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=(5, 16)) * 100, rng.normal(size=16), rng.normal(size=16)
    rms = w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    centred = x - x.mean(-1, keepdims=True)
    layer = w * centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) + b
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.05)):
        args = jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32)
        assert rms_norm(*args, 1e-5).dtype == dtype
        np.testing.assert_allclose(rms_norm(*args, 1e-5).astype(jnp.float32), rms, atol=tolerance)
        normed = layer_norm(*args, jnp.asarray(b, jnp.float32))
        np.testing.assert_allclose(normed.astype(jnp.float32), layer, atol=tolerance)
