"""Quantised models: the reference mode is exact, blocks in memory agree, fast mode is bounded.

Dynamic activations have 4 significant bits, as the weights have: on a small random model whose
router and selection cannot flip, the logits of fast mode are off by at most 10 % of their standard
deviation (root mean square), against 1.3 % that sums in another order make in bfloat16.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import dcp_jax as dj
from dcp_jax.quantization import FP8_CONFIG, block_format
from dcp_jax.testing import write_checkpoint
from dcp_jax.testing.harness import advance, deal, open_runner, selected_sets, tiny_config
from dcp_jax.weights.blocks import FORMATS, dequantize
from dcp_jax.weights.safetensors_file import SINGLE_FILE, Checkpoint

SIZES = {
    **{"hidden_size": 160, "q_lora_rank": 144, "kv_lora_rank": 136, "v_head_dim": 24},
    **{"qk_nope_head_dim": 24, "index_head_dim": 40, "intermediate_size": 136},
    **{"moe_intermediate_size": 160, "dtype": "bfloat16", "num_hidden_layers": 2},
    **{"indexer_types": ["full", "full"], "mlp_layer_types": ["dense", "sparse"]},
}
PROMPT = np.random.default_rng(0).integers(2, 64, 30).tolist()


def dequantised(path: Path, out: Path, dtype: Any) -> Path:
    """The same checkpoint without quantisation, its values rounded to `dtype`."""
    config = json.loads((path / "config.json").read_text())
    stored = block_format(config.pop("quantization_config"))
    checkpoint = Checkpoint(path)
    scales = {name for name in checkpoint if "_scale" in name}
    tensors = {}
    for name in set(checkpoint) - scales:
        value = np.array(checkpoint.read(name))
        if FORMATS.get(checkpoint[name].dtype) == stored:
            scale = checkpoint.read(stored.scale_of(name))
            value = dequantize(value.view(np.uint8), scale, stored.block, stored.kind)
        tensors[name] = value.astype(np.float32).astype(dtype)
    out.mkdir()
    config["dtype"] = np.dtype(dtype).name
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / SINGLE_FILE)
    return out


def answers(path: Path, ranks: int) -> tuple[dict[int, list[set[int]]], list[int]]:
    """What the prompt's tokens select in each full layer and how it goes on, in float32."""
    runner = open_runner(path, tp=ranks, dcp_size=ranks)
    (sequence,) = deal(runner, [PROMPT], room=8)
    explanation = advance(runner, [sequence], explain=True).explanation
    selected = {
        layer: [
            set().union(*selected_sets(explanation, layer, 0, token))
            for token in range(len(PROMPT))
        ]
        for layer in explanation.positions
    }
    for _ in range(6):
        advance(runner, [sequence], explain=True)
    return selected, sequence.tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(quantised checkpoint, the answers of its float32 values) by `quant`."""
    found: dict[str, tuple] = {}

    def get(quant: str) -> tuple:
        if quant not in found:
            root = tmp_path_factory.mktemp(quant)
            path = write_checkpoint(tiny_config(**SIZES), None, quant, root / "quantised")
            plain = dequantised(path, root / "float32", np.float32)
            found[quant] = path, *answers(plain, 1)
        return found[quant]

    return get


@pytest.mark.parametrize(
    ("quant", "ranks"), [("fp8", 1), ("fp8", 2), ("fp8", 4), ("mxfp4", 2)], ids=str
)
def test_reference_mode_is_the_model_of_the_dequantised_weights(written, quant: str, ranks: int):
    path, want, tokens = written(quant)
    selected, got = answers(path, ranks)
    assert got == tokens
    assert selected == want
    assert set(want) == {0, 1}
    assert {len(chosen) for chosen in want[0]} == set(range(1, 9))


def logits(path: Path, tp: int = 1, dcp_size: int = 1, cfg=None, **options: Any) -> np.ndarray:
    """Of the whole prompt, in bfloat16 unless `dtype` says otherwise."""
    cfg = cfg or dj.ModelConfig.from_hf(path)
    dtype = jnp.dtype(options.pop("dtype", "bfloat16"))
    model = dj.Model(cfg, dj.make_mesh(tp, dcp_size), dtype, **options)
    spec, cache = dj.init_cache(model, tokens=32 * dcp_size, page_size=16)
    opts = dj.StepOptions(16, logits="all")
    batch = dj.Batch(
        np.asarray([PROMPT], np.int32),
        np.zeros(1, np.int32),
        np.full(1, len(PROMPT), np.int32),
        np.arange(2, dtype=np.int32)[None],
    )
    step = jax.jit(partial(dj.forward, model, spec=spec, opts=opts))
    out, _ = step(dj.load_params(path, model), cache, batch)
    return np.asarray(out.logits)[0, :, : cfg.vocab_size]


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the difference over the standard deviation."""
    return float(np.sqrt(np.mean((got - want) ** 2)) / want.std())


# Every key is selected and every expert is used: nothing can flip.
STEADY = {"index_topk": 64, "n_routed_experts": 2, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    return write_checkpoint(
        tiny_config(**SIZES, **STEADY), None, "fp8", tmp_path_factory.mktemp("s")
    )


def test_blocks_in_memory_multiply_as_the_weights_rounded_to_bfloat16(steady, tmp_path: Path):
    want = logits(dequantised(steady, tmp_path / "bf16", ml_dtypes.bfloat16))
    # Sums in another order, rounded to bfloat16 activations; so it is for two ranks.
    assert error(logits(steady), want) < 0.03
    assert error(logits(steady, 4, 2), want) < 0.03


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_fast_mode_is_within_its_bound(steady, scale_fmt):
    cfg = dj.ModelConfig.from_hf(steady)
    quantization = {**FP8_CONFIG, **({"scale_fmt": scale_fmt} if scale_fmt else {})}
    cfg = dj.ModelConfig(**{**vars(cfg), "quantization": quantization})
    fast = logits(steady, 2, 2, cfg, activation_scheme="dynamic")
    off = error(fast, logits(steady, 2, 2))
    assert 0.02 < off < 0.10
