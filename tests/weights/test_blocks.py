"""Quantised tensors: bytes and values bit for bit, whatever the cut; what is refused, by name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcp_jax.config import ModelConfig
from dcp_jax.configs import named_config
from dcp_jax.mesh import make_mesh
from dcp_jax.model import Model
from dcp_jax.quantization import FP8_CONFIG, kept_modules
from dcp_jax.testing import write_checkpoint
from dcp_jax.testing.harness import tiny_config
from dcp_jax.weights.blocks import dequantize, quantize, quantize_mxfp4
from dcp_jax.weights.hf import flatten, load_hf, shard_tasks
from dcp_jax.weights.mapping import sources
from dcp_jax.weights.orbax import load_orbax, save_orbax
from dcp_jax.weights.safetensors_file import INDEX_FILE, SINGLE_FILE, Checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
# Ragged both ways in every kind of tensor: experts and the indexer's among them; blocks of the
# merged kv_b_proj straddle heads (64 rows each) and its windows (24 and 40).
RAGGED = {
    **{"hidden_size": 192, "q_lora_rank": 160, "kv_lora_rank": 144, "v_head_dim": 40},
    **{"qk_nope_head_dim": 24, "index_head_dim": 40, "intermediate_size": 200},
    **{"moe_intermediate_size": 160, "num_nextn_predict_layers": 1, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Callable[[str], Path]:
    """A checkpoint in a released form by its `quant`, written once."""
    written: dict[str, Path] = {}

    def get(quant: str) -> Path:
        if quant not in written:
            config, out = tiny_config(**RAGGED), tmp_path_factory.mktemp(quant)
            if quant == "ue8m0":
                config["quantization_config"] = {**FP8_CONFIG, "scale_fmt": "ue8m0"}
            if quant == "float32":
                config["dtype"] = "float32"
            form: Any = {"ue8m0": "fp8", "float32": None}.get(quant, quant)
            written[quant] = write_checkpoint(config, None, form, out)
        return written[quant]

    return get


def load(path: Path, tp: int, dtype: Any, **options: Any) -> dict[str, np.ndarray]:
    cfg = options.pop("cfg", None) or ModelConfig.from_hf(path)
    mesh = make_mesh(tp)
    defs = Model(cfg, mesh, np.dtype(dtype), with_mtp=True).param_defs
    return {n: np.asarray(a) for n, a in flatten(load_hf(path, cfg, defs, mesh, **options))}


def cut(arrays: dict[str, np.ndarray], like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without the padding that `like` has not; what is cut off is zero."""
    found = {}
    for name, array in arrays.items():
        inside = tuple(slice(0, n) for n in like[name].shape)
        found[name] = array[inside]
        assert np.count_nonzero(array) == np.count_nonzero(found[name]), name
    return found


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert set(got) == set(want)
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert np.array_equal(got[name], want[name]), name


def test_golden_weights_through_a_file(tmp_path: Path, golden_quant):
    stored = {
        "w.weight": golden_quant["w_fp8"].view(ml_dtypes.float8_e4m3fn),
        "w.weight_scale_inv": golden_quant["w_scale_inv"],
    }
    save_file(stored, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint(tmp_path)
    data = checkpoint.read("w.weight").view(np.uint8)
    assert np.array_equal(data, golden_quant["w_fp8"])
    values = dequantize(data, checkpoint.read("w.weight_scale_inv"), (128, 128))
    assert np.array_equal(values.astype(BF16).view(np.uint16), golden_quant["w_dequant_bf16"])


@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantise(ue8m0: bool):
    values = np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32)
    values[:128, :128] = 0
    values[200, 150] = 1e4
    data, scale = quantize(values, ue8m0=ue8m0)
    back = dequantize(data, scale, (128, 128))
    assert scale.shape == (3, 2)
    assert scale[0, 0] == 1
    assert np.isfinite(back).all()
    # 4 significant bits, and below 2^-6 steps of 2^-9
    spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:300, :200]
    assert (np.abs(back - values) <= np.maximum(np.abs(values) / 16, spread * 2.0**-10)).all()
    if ue8m0:
        assert (np.frexp(scale)[0] == 0.5).all()
        amax = np.abs(values[128:256, 128:]).max()
        assert amax / 448 <= scale[1, 1] < amax / 224
    else:
        assert back[200, 150] == 1e4
    again = quantize(back, ue8m0=ue8m0)
    assert np.array_equal(dequantize(*again, (128, 128)), back)


def test_quantise_mxfp4():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (4, 32), np.uint8)
    data[:, ::16] = 0x77  # every group has a 6, so its scale is found again
    data[data & 15 == 8] &= 0xF0  # -0 is 0 after a round trip through values
    data[data >> 4 == 8] &= 0x0F
    scale = rng.integers(100, 150, (4, 2), np.uint8)
    values = dequantize(data, scale, (1, 32), "mxfp4")
    again = quantize_mxfp4(values)
    assert np.array_equal(again[0], data)
    assert np.array_equal(again[1], scale)
    noise = rng.normal(size=(8, 64)).astype(np.float32)
    back = dequantize(*quantize_mxfp4(noise), (1, 32), "mxfp4")
    # 2 significant bits up to 6, whence up to 8 saturates: a quarter of a group's largest
    assert np.abs(back - noise).max() <= np.abs(noise).max() / 4
    with pytest.raises(ValueError, match="whole groups of 32 values, not of 40"):
        quantize_mxfp4(np.zeros((2, 40), np.float32))


@pytest.mark.parametrize(
    ("model", "param", "blocks"),
    [
        ("glm-5.2", "attn/q_b_proj", (1, 128, 128)),  # heads of 256 rows
        ("glm-5.2", "attn/w_uk", (1, 64, 128)),  # 448 rows a head, the first 192
        ("glm-5.2", "attn/w_uv", (1, 64, 128)),
        ("glm-5.2", "attn/kv_a_proj", (128, 128)),  # 576 rows: 4.5 blocks
        ("deepseek-v3.2", "attn/q_b_proj", (1, 64, 128)),  # 192 rows
        ("deepseek-v3.2", "attn/w_uv", (1, 128, 128)),
        ("deepseek-v3.2", "attn/o_proj", (128, 1, 128)),
        ("deepseek-v3.2", "mlp/experts_down", (1, 128, 128)),
    ],
)
def test_blocks_of_parameters(model: str, param: str, blocks: tuple[int, ...]):
    table = sources(ModelConfig.from_hf(named_config(model)), with_mtp=False)
    assert table[f"layers/{5 if 'experts' in param else 0}/{param}"].blocks((128, 128)) == blocks


@pytest.mark.parametrize("quant", ["fp8", "ue8m0", "mxfp4"])
def test_blocks_and_values_are_the_same_for_every_cut(directory, quant: str):
    """Held in blocks on any number of ranks, and dequantised at load: one set of values."""
    path = directory(quant)
    whole, dense = load(path, 1, BF16), load(path, 1, np.float32)
    cfg = ModelConfig.from_hf(path)
    blocks = Model(cfg, make_mesh(1), BF16, with_mtp=True).blocks
    assert {name.removesuffix("/scale") for name in whole if "/scale" in name} == set(blocks)
    for name, layout in blocks.items():
        data, scale = whole[f"{name}/weight"], whole[f"{name}/scale"]
        values = dequantize(data, scale, layout.sizes, layout.kind)
        assert np.array_equal(values, dense[name]), name
        if quant == "ue8m0":
            assert (np.frexp(scale[scale > 0])[0] == 0.5).all()
    for tp in (2, 3):
        assert_equal(cut(load(path, tp, BF16), whole), whole)
        assert_equal(cut(load(path, tp, np.float32), dense), dense)


def test_values_are_the_files(directory):
    """Against a plain reading of the tensors: each value times the scale of its 128 x 128 block."""
    path = directory("fp8")
    cfg, dense = ModelConfig.from_hf(path), load(directory("fp8"), 1, np.float32)
    checkpoint = Checkpoint(path)

    def tensor(name: str) -> np.ndarray:
        values = checkpoint.read(f"{name}.weight").astype(np.float32)
        scale = checkpoint.read(f"{name}.weight_scale_inv")
        rows, columns = (np.arange(n) // 128 for n in values.shape)
        return values * scale[np.ix_(rows, columns)]

    heads, nope = cfg.num_attention_heads, cfg.qk_nope_head_dim
    kv_b = tensor("model.layers.0.self_attn.kv_b_proj").reshape(heads, -1, cfg.kv_lora_rank)
    assert np.array_equal(dense["layers/0/attn/w_uk"], kv_b[:, :nope])
    assert np.array_equal(dense["layers/0/attn/w_uv"], kv_b[:, nope:])
    wq_b = tensor("model.layers.2.self_attn.indexer.wq_b")
    assert np.array_equal(dense["layers/2/attn/indexer/wq_b"].reshape(wq_b.shape), wq_b)
    down = tensor("model.layers.1.mlp.experts.7.down_proj")
    held = dense["layers/1/mlp/experts_down"][7]
    assert np.array_equal(held[:, : down.shape[1]], down)
    assert not held[:, down.shape[1] :].any()


@pytest.mark.parametrize("tp", [1, 3])
def test_conversion_at_load_is_the_released_form(directory, tp: int):
    """A float checkpoint quantised at load has the bytes of the FP8 checkpoint of its values."""
    cfg = ModelConfig.from_hf(directory("fp8"))
    stored = load(directory("fp8"), tp, BF16)
    converted = load(directory("float32"), tp, BF16, cfg=cfg, convert=True)
    in_blocks = [name for name in stored if name.endswith(("/weight", "/scale"))]
    assert_equal({n: converted[n] for n in in_blocks}, {n: stored[n] for n in in_blocks})


def test_a_rank_reads_its_part_of_bytes_and_scales(directory):
    path = directory("fp8")
    cfg, checkpoint = ModelConfig.from_hf(path), Checkpoint(path)
    defs = dict(flatten(Model(cfg, make_mesh(4), BF16, with_mtp=True).param_defs))
    blocks = Model(cfg, make_mesh(4), BF16, with_mtp=True).blocks
    name = "layers/0/attn/w_uk"
    leaves = [defs[f"{name}/weight"], defs[f"{name}/scale"]]
    outs = [np.zeros((2, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    bounds = ((2, 4), *((0, n) for n in leaves[0].shape[1:]))
    for task in shard_tasks(
        checkpoint, sources(cfg, with_mtp=True)[name], bounds, outs, blocks[name]
    ):
        task()
    # heads 2 and 3: the bytes of the window, and the row of scales that covers rows 128 to 255
    assert checkpoint.bytes_read == 2 * 24 * 144 + 2 * 4
    assert outs[0].any()


# ---- Orbax


def test_orbax_keeps_blocks_and_dequantises_on_demand(tmp_path: Path, directory):
    path = directory("fp8")
    cfg = ModelConfig.from_hf(path)

    def defs(tp: int, dtype: Any) -> dict:
        return Model(cfg, make_mesh(tp), np.dtype(dtype), with_mtp=True).param_defs

    save_orbax(tmp_path / "saved", load_hf(path, cfg, defs(2, BF16), make_mesh(2)), path)
    for tp, dtype in ((3, BF16), (2, np.float32)):
        restored = load_orbax(tmp_path / "saved", defs(tp, dtype), make_mesh(tp, tp))
        got = {name: np.asarray(array) for name, array in flatten(restored)}
        want = load(path, tp, dtype)
        for name in want:
            # Norms and their like were rounded to bfloat16 when they were held beside blocks.
            rounded = want[name].astype(BF16).astype(want[name].dtype)
            assert np.array_equal(got[name], want[name]) or np.array_equal(got[name], rounded), name


def test_orbax_says_how_it_holds_weights(tmp_path: Path, directory):
    fp8, plain = directory("fp8"), directory("float32")
    cfg = ModelConfig.from_hf(fp8)
    mesh = make_mesh(1)
    defs = Model(cfg, mesh, BF16, with_mtp=True).param_defs
    save_orbax(tmp_path / "a", load_hf(plain, cfg, defs, mesh, convert=True), plain)
    assert ModelConfig.from_hf(tmp_path / "a").quantization == FP8_CONFIG
    dense = Model(cfg, mesh, np.dtype(np.float32), with_mtp=True).param_defs
    save_orbax(tmp_path / "b", load_hf(fp8, cfg, dense, mesh), fp8)
    assert ModelConfig.from_hf(tmp_path / "b").quantization is None
    with pytest.raises(ValueError, match="convert the Hugging Face directory with --quantization"):
        load_orbax(tmp_path / "b", defs, mesh)


# ---- refusals


@dataclass(frozen=True)
class Bad:
    id: str
    spoil: Callable[[dict[str, np.ndarray], dict[str, Any]], Any]
    says: tuple[str, ...]


Q_A = "model.layers.0.self_attn.q_a_proj.weight"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"

BAD = [
    Bad("no_scale", lambda t, c: t.pop(f"{Q_A}_scale_inv"), ("missing", f"{Q_A}_scale_inv")),
    Bad(
        "scale_of_another_grid",
        lambda t, c: t.update({f"{UP}_scale_inv": np.ones((1, 2), np.float32)}),
        (f"{UP}_scale_inv is [1, 2], not [2, 2]",),
    ),
    Bad(
        "scale_of_another_dtype",
        lambda t, c: t.update({f"{UP}_scale_inv": np.ones((2, 2), np.int32)}),
        (f"{UP}_scale_inv is I32",),
    ),
    Bad(
        "not_quantised",
        lambda t, c: (t.update({UP: np.zeros((160, 192), BF16)}), t.pop(f"{UP}_scale_inv")),
        ("not quantised, but the quantization_config says", "modules_to_not_convert", UP),
    ),
    Bad(
        "no_config",
        lambda t, c: c.pop("quantization_config"),
        ("config.json has no quantization_config", f"{Q_A} is F8_E4M3"),
    ),
    Bad(
        "bytes_of_another_format",
        lambda t, c: t.update({UP: np.zeros((160, 96), np.uint8)}),
        ("nor e4m3 in blocks", f"{UP} is U8"),
    ),
    Bad(
        "nan_scale",
        lambda t, c: t.update({f"{UP}_scale_inv": np.full((2, 2), np.nan, np.float32)}),
        ("is corrupt: tensor", SINGLE_FILE, f"{UP}_scale_inv", "download it again"),
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in BAD])
def test_bad_quantised_checkpoints_are_named(tmp_path: Path, directory, case: Bad):
    source = directory("fp8")
    config = json.loads((source / "config.json").read_text())
    checkpoint = Checkpoint(source)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint}
    case.spoil(tensors, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match=r"is not a checkpoint|is corrupt") as caught:
        load(tmp_path, 1, BF16)
    for part in case.says:
        assert part in str(caught.value)


def test_fused_experts_cannot_be_converted(tmp_path: Path, directory):
    checkpoint = Checkpoint(directory("float32"))
    tensors = {n: np.array(checkpoint.read(n)) for n in checkpoint if ".experts." not in n}
    for layer in (1, 3):
        at = f"model.layers.{layer}.mlp.experts"
        tensors[f"{at}.gate_up_proj"] = np.zeros((8, 320, 192), np.float32)
        tensors[f"{at}.down_proj"] = np.zeros((8, 192, 160), np.float32)
    (tmp_path / "config.json").write_text((directory("float32") / "config.json").read_text())
    save_file(tensors, tmp_path / SINGLE_FILE)
    cfg = ModelConfig.from_hf(directory("fp8"))
    with pytest.raises(ValueError, match=r"experts fused, .*layers\.1\.mlp\.experts\.gate_up"):
        load(tmp_path, 1, BF16, cfg=cfg, convert=True)
    assert load(tmp_path, 1, np.float32)["layers/1/mlp/experts_down"].shape == (8, 192, 160)


def test_a_truncated_shard_is_named(tmp_path: Path, directory):
    path = write_checkpoint(tiny_config(**RAGGED), None, "fp8", tmp_path, shard_bytes=10**6)
    weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    shard = path / weight_map["lm_head.weight"]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{shard.name} is truncated: .* tensor model\.\S+ ends"):
        load(path, 1, BF16)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path):
    save_file({"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}, tmp_path / SINGLE_FILE)
    raw = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(raw.replace(b"[16,32]", b"[12,28]"))
    with pytest.raises(ValueError, match=r"is corrupt: the bytes of tensor b from \d+ on are also"):
        Checkpoint(tmp_path)


def test_modules_that_are_not_converted_stay_floats(tmp_path: Path):
    keep = ["model.layers.0.self_attn", "indexer.wk", "*shared_experts*", r"re:.*layers\.2\.mlp"]
    quantization = {**FP8_CONFIG, "modules_to_not_convert": keep}
    config = tiny_config(**RAGGED, quantization_config=quantization)
    path = write_checkpoint(config, None, "fp8", tmp_path)
    arrays = load(path, 2, BF16)
    floats = ("0/attn/q_a_proj", "0/attn/w_uv", "2/attn/indexer/wk", "1/mlp/shared/down_proj")
    for name in (*floats, "2/mlp/gate_up_proj"):
        assert arrays[f"layers/{name}"].dtype == BF16
    for name in ("1/attn/q_a_proj", "2/attn/indexer/wq_b", "1/mlp/experts_down"):
        assert arrays[f"layers/{name}/weight"].dtype == np.uint8
    is_kept = kept_modules({**FP8_CONFIG, "modules_to_not_convert": ["model.layers.1"]})
    assert is_kept("model.layers.1.mlp.up_proj.weight")
    assert not is_kept("model.layers.10.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "is NVFP4, whose e2m1 values have"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "the quantization is NVFP4",
        ),
        ({**FP8_CONFIG, "activation_scheme": "static"}, "activation_scheme='static' needs scales"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
            "weights of dtype='int4' in groups of None",
        ),
        ({**FP8_CONFIG, "modules_to_not_convert": [1]}, "entries that are no names"),
    ],
    ids=["nvfp4", "nvfp4-packed", "static", "quark-int4", "no-names"],
)
def test_other_quantisations_are_refused_by_name(quantization: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        ModelConfig.from_hf(tiny_config(quantization_config=quantization))
