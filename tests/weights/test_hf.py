"""Hugging Face checkpoints against safetensors' own loader, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

from dcp_jax.config import ModelConfig
from dcp_jax.mesh import make_mesh
from dcp_jax.testing.checkpoints import random_tensors, write_random_checkpoint
from dcp_jax.weights import hf
from dcp_jax.weights.hf import flatten, load_hf
from dcp_jax.weights.mapping import sources
from dcp_jax.weights.safetensors_file import SINGLE_FILE, Checkpoint

from .conftest import GOLDEN, make_defs

CASES = ("p1_dsv32_basic", "p2_dsv32_yarn_groups_pad", "p3_glm_indexshare", "p4_glm_mtp_bf16")


def _hf_layer(p: dict[str, Any], cfg: ModelConfig) -> dict[str, np.ndarray]:
    """A layer's parameters as Hugging Face's tensors, without padding, written out by hand."""
    heads, inner = cfg.num_attention_heads, cfg.intermediate_size
    expert, shared = cfg.moe_intermediate_size, cfg.n_shared_experts * cfg.moe_intermediate_size
    attn, mlp = p["attn"], p["mlp"]
    kv_b = np.concatenate([attn["w_uk"][:heads], attn["w_uv"][:heads]], axis=1)
    out = {
        "input_layernorm.weight": p["input_layernorm"],
        "post_attention_layernorm.weight": p["post_attention_layernorm"],
        "self_attn.q_a_proj.weight": attn["q_a_proj"],
        "self_attn.q_a_layernorm.weight": attn["q_a_layernorm"],
        "self_attn.q_b_proj.weight": attn["q_b_proj"][:heads].reshape(-1, cfg.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": attn["kv_a_proj"],
        "self_attn.kv_a_layernorm.weight": attn["kv_a_layernorm"],
        "self_attn.kv_b_proj.weight": kv_b.reshape(-1, cfg.kv_lora_rank),
        "self_attn.o_proj.weight": attn["o_proj"][:, :heads].reshape(cfg.hidden_size, -1),
    }
    for ours, theirs in (
        ("wq_b", "wq_b.weight"),
        ("wk", "wk.weight"),
        ("weights_proj", "weights_proj.weight"),
        ("k_norm_weight", "k_norm.weight"),
        ("k_norm_bias", "k_norm.bias"),
    ):
        if "indexer" in attn:
            value = attn["indexer"][ours]
            rows = (-1, cfg.q_lora_rank) if ours == "wq_b" else value.shape
            out[f"self_attn.indexer.{theirs}"] = value.reshape(rows)
    if "gate" not in mlp:
        out["mlp.gate_proj.weight"], out["mlp.up_proj.weight"] = mlp["gate_up_proj"][:, :inner]
        out["mlp.down_proj.weight"] = mlp["down_proj"][:, :inner]
        return out
    out["mlp.gate.weight"] = mlp["gate"]
    out["mlp.gate.e_score_correction_bias"] = mlp["e_score_correction_bias"]
    for e in range(cfg.n_routed_experts):
        gate, up = mlp["experts_gate_up"][e, :, :expert]
        out[f"mlp.experts.{e}.gate_proj.weight"] = gate
        out[f"mlp.experts.{e}.up_proj.weight"] = up
        out[f"mlp.experts.{e}.down_proj.weight"] = mlp["experts_down"][e, :, :expert]
    gate, up = mlp["shared"]["gate_up_proj"][:, :shared]
    out["mlp.shared_experts.gate_proj.weight"] = gate
    out["mlp.shared_experts.up_proj.weight"] = up
    out["mlp.shared_experts.down_proj.weight"] = mlp["shared"]["down_proj"][:, :shared]
    return out


def to_hf(params: dict[str, Any], cfg: ModelConfig) -> dict[str, np.ndarray]:
    """All parameters as Hugging Face's tensors."""
    p = jax.tree.map(np.asarray, params)
    out = {
        "model.embed_tokens.weight": p["embed"][: cfg.vocab_size],
        "model.norm.weight": p["norm"],
        "lm_head.weight": p["lm_head"][: cfg.vocab_size],
    }
    layers = dict(p["layers"])
    if "mtp" in p:
        last = f"model.layers.{cfg.num_hidden_layers}."
        for name in ("enorm", "hnorm", "eh_proj"):
            out[f"{last}{name}.weight"] = p["mtp"][name]
        out[f"{last}shared_head.norm.weight"] = p["mtp"]["norm"]
        layers[str(cfg.num_hidden_layers)] = p["mtp"]["layer"]
    for layer, values in layers.items():
        for name, value in _hf_layer(values, cfg).items():
            out[f"model.layers.{layer}.{name}"] = value
    return out


def assert_padding_is_zero(params: dict[str, Any], cfg: ModelConfig) -> None:
    """Every value outside the checkpoint's own range is zero."""
    for name, source in sources(cfg, with_mtp="mtp" in params).items():
        value = np.asarray(dict(flatten(params))[name]).copy()
        value[tuple(slice(0, n) for n in source.shape)] = 0
        assert not value.any(), name


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].shape == value.shape, name
        assert np.array_equal(ours[name].astype(np.float32), value.astype(np.float32)), name


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 2), (3, 3), (8, 4)])
@pytest.mark.parametrize("case", CASES)
def test_golden_tensors_are_bit_exact(case: str, tp: int, dcp: int):
    cfg = ModelConfig.from_hf(GOLDEN / case)
    with_mtp = cfg.num_nextn_predict_layers > 0
    defs = make_defs(cfg, tp, np.float32, with_mtp)
    params = load_hf(GOLDEN / case, cfg, defs, make_mesh(tp, dcp))
    assert jax.tree.map(lambda d: (d.shape, d.dtype), defs) == jax.tree.map(
        lambda a: (a.shape, a.dtype), params
    )
    assert_same(to_hf(params, cfg), load_file(GOLDEN / case / SINGLE_FILE))
    assert_padding_is_zero(params, cfg)


def test_bf16_in_memory_rounds_to_nearest_and_keeps_float32_where_asked():
    cfg = ModelConfig.from_hf(GOLDEN / CASES[0])
    defs = make_defs(cfg, 2, ml_dtypes.bfloat16)
    params = load_hf(GOLDEN / CASES[0], cfg, defs, make_mesh(2, 1))
    stored = load_file(GOLDEN / CASES[0] / SINGLE_FILE)
    assert params["norm"].dtype == ml_dtypes.bfloat16
    assert params["layers"]["1"]["mlp"]["gate"].dtype == np.float32
    embed = np.asarray(params["embed"])[: cfg.vocab_size]
    assert np.array_equal(embed, stored["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16))


def test_mtp_is_left_out_when_not_asked_for():
    cfg = ModelConfig.from_hf(GOLDEN / CASES[3])
    params = load_hf(GOLDEN / CASES[3], cfg, make_defs(cfg, 2, np.float32), make_mesh(2, 2))
    assert "mtp" not in params
    stored = load_file(GOLDEN / CASES[3] / SINGLE_FILE)
    mtp = f"model.layers.{cfg.num_hidden_layers}."
    assert_same(to_hf(params, cfg), {k: v for k, v in stored.items() if not k.startswith(mtp)})


def _load(directory: Path, tp: int = 2, with_mtp: bool = True, **kwargs: Any) -> dict[str, Any]:
    cfg = ModelConfig.from_hf(directory)
    defs = make_defs(cfg, tp, np.float32, with_mtp)
    return load_hf(directory, cfg, defs, make_mesh(tp, tp), **kwargs)


def test_sharded_index_equals_single_file(tmp_path: Path, tiny_config: dict[str, Any]):
    one = write_random_checkpoint(tmp_path / "one", tiny_config, seed=3)
    three = write_random_checkpoint(tmp_path / "three", tiny_config, seed=3, shards=3)
    assert len(list(three.glob("*.safetensors"))) == 3
    cfg = ModelConfig.from_hf(three)
    assert_same(to_hf(_load(three, 3, progress=True), cfg), load_file(one / SINGLE_FILE))


def test_fused_experts_are_taken_as_the_per_expert_ones(
    tmp_path: Path, tiny_config: dict[str, Any]
):
    cfg = ModelConfig.from_hf(tiny_config)
    per_expert = random_tensors(tiny_config)
    fused = {name: value for name, value in per_expert.items() if ".experts." not in name}
    for layer in range(1, cfg.num_hidden_layers + 1):
        at = f"model.layers.{layer}.mlp.experts"

        def stack(kind: str, at: str = at) -> np.ndarray:
            experts = range(cfg.n_routed_experts)
            return np.stack([per_expert[f"{at}.{e}.{kind}_proj.weight"] for e in experts])

        fused[f"{at}.gate_up_proj"] = np.concatenate([stack("gate"), stack("up")], axis=1)
        fused[f"{at}.down_proj"] = stack("down")
    _write(tmp_path, tiny_config, fused)
    params = _load(tmp_path, 3)
    assert_same(to_hf(params, cfg), per_expert)
    assert_padding_is_zero(params, cfg)


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / SINGLE_FILE)


@pytest.mark.parametrize("stored_head", [False, True])
def test_tied_head_is_the_embedding(tmp_path: Path, tiny_config: dict[str, Any], stored_head: bool):
    config = {**tiny_config, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    if stored_head:
        tensors["lm_head.weight"] = np.zeros((3, 3), np.float32)
    _write(tmp_path, config, tensors)
    params = _load(tmp_path)
    assert np.array_equal(params["lm_head"], params["embed"])


def test_known_extras_are_ignored(tmp_path: Path, tiny_config: dict[str, Any]):
    """MTP copies, indexers of layers made shared by an override, old RoPE buffers."""
    tensors = random_tensors({**tiny_config, "indexer_types": ["full"] * 5})
    embed = tensors["model.embed_tokens.weight"]
    tensors["model.layers.5.embed_tokens.weight"] = embed
    tensors["model.layers.5.shared_head.head.weight"] = embed
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    _write(tmp_path, tiny_config, tensors)
    params = _load(tmp_path)
    assert "indexer" not in params["layers"]["2"]["attn"]
    assert "indexer" in params["layers"]["3"]["attn"]
    assert "mtp" not in _load(tmp_path, with_mtp=False)


def test_mtp_tensors_of_a_config_that_forgot_them_are_ignored(
    tmp_path: Path, tiny_config: dict[str, Any]
):
    _write(tmp_path, {**tiny_config, "num_nextn_predict_layers": 0}, random_tensors(tiny_config))
    assert "mtp" not in _load(tmp_path, with_mtp=False)


# ---- bytes read


class _Counting(Checkpoint):
    opened: "_Counting"

    def __init__(self, directory: Path):
        super().__init__(directory)
        type(self).opened = self


def _data_bytes(checkpoint: Checkpoint) -> int:
    return sum(checkpoint[name].end - checkpoint[name].begin for name in checkpoint)


@pytest.mark.parametrize("tp", [1, 3, 8])
def test_every_byte_is_read_once_whatever_the_replicas(
    tmp_path: Path, tiny_config: dict[str, Any], tp: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hf, "Checkpoint", _Counting)
    _load(write_random_checkpoint(tmp_path, tiny_config), tp)
    assert _Counting.opened.bytes_read == _data_bytes(_Counting.opened)


def test_one_rank_reads_only_its_part(tmp_path: Path, tiny_config: dict[str, Any]):
    config = {**tiny_config, "vocab_size": 64, "num_attention_heads": 8}
    cfg = ModelConfig.from_hf(config)
    write_random_checkpoint(tmp_path, config)
    checkpoint = Checkpoint(tmp_path)
    table = sources(cfg, with_mtp=True)
    mesh = make_mesh(8, 4)
    for name, spec in flatten(make_defs(cfg, 8, np.float32, True)):
        index = NamedSharding(mesh, spec.spec).devices_indices_map(spec.shape)
        cuts = index[mesh.devices.flat[5]]
        bounds = [cut.indices(n)[:2] for cut, n in zip(cuts, spec.shape, strict=True)]
        before = checkpoint.bytes_read
        out = np.zeros([b - a for a, b in bounds], spec.dtype)
        for task in hf.shard_tasks(checkpoint, table[name], tuple(bounds), [out]):
            task()
        share = 8 if any(spec.spec) else 1
        assert checkpoint.bytes_read - before == np.prod(spec.shape) * 4 // share, name
    replicated = sum(
        np.prod(spec.shape) * 4
        for _, spec in flatten(make_defs(cfg, 8, np.float32, True))
        if not any(spec.spec)
    )
    assert checkpoint.bytes_read == replicated + (_data_bytes(checkpoint) - replicated) // 8


# ---- refusals


@dataclass(frozen=True)
class Bad:
    id: str
    spoil: Callable[[dict[str, np.ndarray]], Any]
    says: tuple[str, ...]


def _drop(tensors: dict[str, np.ndarray], part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


ALL_AT_ONCE = {"model.norm.weight": np.zeros((2, 2), np.float32), "odd.one": np.zeros(1)}

BAD = [
    Bad("missing", lambda t: t.pop("lm_head.weight"), ("1 tensors are missing: lm_head.weight",)),
    Bad(
        "many_missing",
        lambda t: _drop(t, ".experts."),
        ("120 tensors are missing", "model.layers.1.mlp.experts.0.gate_proj.weight", "100 more"),
    ),
    Bad(
        "no_indexer_on_a_full_layer",
        lambda t: _drop(t, "layers.3.self_attn.indexer"),
        ("5 tensors are missing", "model.layers.3.self_attn.indexer.wk.weight"),
    ),
    Bad(
        "unexpected",
        lambda t: t.update({"model.layers.7.q": np.zeros(1), "visual.x": np.zeros(1)}),
        ("2 tensors are unexpected: model.layers.7.q, visual.x",),
    ),
    Bad(
        "misshapen",
        lambda t: t.update({"model.norm.weight": np.zeros((3, 1), np.float32)}),
        ("another shape", "model.norm.weight is [3, 1], not [48]"),
    ),
    Bad(
        "transposed",
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T}),
        ("lm_head.weight is [48, 61], not [61, 48]",),
    ),
    Bad(
        "integers",
        lambda t: t.update({"model.norm.weight": np.zeros(48, np.int32)}),
        ("none of F32, BF16, F16", "model.norm.weight is I32"),
    ),
    Bad(
        "fp8",
        lambda t: t.update(
            {
                "lm_head.weight": t["lm_head.weight"].astype(ml_dtypes.float8_e4m3fn),
                "lm_head.weight_scale_inv": np.ones((1, 1), np.float32),
            }
        ),
        ("config.json has no quantization_config", "lm_head.weight is F8_E4M3"),
    ),
    Bad(
        "all_in_one_message",
        lambda t: (t.pop("lm_head.weight"), t.update(ALL_AT_ONCE)),
        ("missing: lm_head.weight", "unexpected: odd.one", "model.norm.weight is [2, 2]"),
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in BAD])
def test_what_is_wrong_is_named_before_any_data_is_read(
    tmp_path: Path, tiny_config: dict[str, Any], case: Bad, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hf, "Checkpoint", _Counting)
    tensors = random_tensors(tiny_config)
    case.spoil(tensors)
    _write(tmp_path, tiny_config, tensors)
    with pytest.raises(
        ValueError, match="is not a checkpoint of this glm_moe_dsa config"
    ) as caught:
        _load(tmp_path)
    for part in (str(tmp_path), *case.says):
        assert part in str(caught.value)
    assert _Counting.opened.bytes_read == 0
    assert len(str(caught.value)) < 3000


def test_definitions_of_another_model_are_refused(tmp_path: Path, tiny_config: dict[str, Any]):
    """Padding is for sharded axes only: a wrong hidden size must not become a row of zeros."""
    cfg = ModelConfig.from_hf(tiny_config)
    write_random_checkpoint(tmp_path, tiny_config)
    other = ModelConfig.from_hf({**tiny_config, "q_lora_rank": 40})
    with pytest.raises(ValueError, match=r"q_a_proj is \[40, 48\] for \[32, 48\]"):
        load_hf(tmp_path, cfg, make_defs(other, 2, np.float32, True), make_mesh(2, 2))
    defs = make_defs(cfg, 2, np.float32, True)
    del defs["norm"]
    with pytest.raises(ValueError, match="only one of model and weights has: norm"):
        load_hf(tmp_path, cfg, defs, make_mesh(2, 2))
