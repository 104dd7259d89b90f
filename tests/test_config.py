"""ModelConfig: the released models and the golden ones, every way to spell, every refusal."""

import json
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dcp_jax import ModelConfig

GOLDEN = Path(__file__).parent / "golden"

DEEPSEEK_V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

GLM_5: dict[str, Any] = {
    key: value
    for key, value in DEEPSEEK_V32.items()
    if key not in ("quantization_config", "rope_scaling", "rope_theta", "torch_dtype")
} | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "head_dim": 64,
    "hidden_size": 6144,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "pad_token_id": 154820,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

GLM_52: dict[str, Any] = GLM_5 | {
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "max_position_embeddings": 1048576,
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}


def tiny(**changes: Any) -> dict[str, Any]:
    """p3's config (GLM, 5 layers) without IndexShare, with changes; `...` removes a key."""
    raw = json.loads((GOLDEN / "p3_glm_indexshare" / "config.json").read_text())
    for key in ("indexer_types", "index_topk_freq", "index_skip_topk_offset"):
        del raw[key]
    raw |= changes
    return {key: value for key, value in raw.items() if value is not ...}


def test_deepseek_v32():
    c = ModelConfig.from_hf(DEEPSEEK_V32)
    assert c.softmax_scale == pytest.approx(0.135234, abs=5e-7)
    assert c.qk_head_dim == 192
    assert c.rope.rope_type == "yarn"
    assert (c.rope.rope_theta, c.rope.factor) == (10000, 40)
    assert (c.rope.beta_fast, c.rope.beta_slow) == (32, 1)
    assert (c.rope.mscale, c.rope.mscale_all_dim) == (1, 1)
    assert c.rope.original_max_position_embeddings == 4096
    assert c.rope.attention_factor == 1.0
    assert c.indexer_rope_interleave is False
    assert c.full_layers == tuple(range(61))
    assert c.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 58
    assert (c.bos_token_id, c.eos_token_ids, c.pad_token_id) == (0, (1,), None)
    assert c.dtype == "bfloat16"
    assert c.quantization == DEEPSEEK_V32["quantization_config"]
    assert c.num_nextn_predict_layers == 1
    assert (c.n_group, c.topk_group) == (8, 4)
    assert (c.rms_norm_eps, c.latent_norm_eps) == (1e-6, 1e-6)


def test_glm_5():
    c = ModelConfig.from_hf(GLM_5)
    assert c.softmax_scale == 1 / 16
    assert c.qk_head_dim == 256
    assert c.rope.rope_type == "default"
    assert c.rope.rope_theta == 1e6
    assert c.rope.attention_factor == 1.0
    assert c.indexer_rope_interleave is True
    assert c.full_layers == tuple(range(78))
    assert c.eos_token_ids == (154820, 154827, 154829)
    assert (c.bos_token_id, c.pad_token_id) == (None, 154820)
    assert (c.rms_norm_eps, c.latent_norm_eps) == (1e-5, 1e-6)
    assert c.index_share_for_mtp_iteration is False
    assert c.quantization is None


def test_glm_52():
    c = ModelConfig.from_hf(GLM_52)
    assert c.full_layers == (0, 1, *range(2, 75, 4))
    assert len(c.full_layers) == 21
    assert c.indexer_types.count("shared") == 57
    assert [c.index_ordinal(layer) for layer in (0, 1, 2, 3, 5, 6, 77, 78)] == [
        *(0, 1, 2, 2, 2, 3, 20, 21)
    ]
    assert [c.is_full(layer) for layer in (2, 3, 77, 78)] == [True, False, False, True]
    assert [c.is_sparse(layer) for layer in (2, 3, 77, 78)] == [False, True, True, True]
    assert c.index_share_for_mtp_iteration is True
    assert c.softmax_scale == 1 / 16  # whatever the misleading head_dim=192 says


@pytest.mark.parametrize("case", sorted(p.name for p in GOLDEN.iterdir() if p.is_dir()))
def test_golden_configs(case: str):
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    c = ModelConfig.from_hf(GOLDEN / case)
    assert c == ModelConfig.from_hf(raw) == ModelConfig.from_hf(str(GOLDEN / case))
    assert list(c.mlp_layer_types) == raw["mlp_layer_types"]
    assert list(c.indexer_types) == raw.get("indexer_types", ["full"] * c.num_hidden_layers)
    assert c.indexer_rope_interleave is raw["indexer_rope_interleave"]
    assert c.num_nextn_predict_layers == raw.get("num_nextn_predict_layers", 0)
    assert c.dtype == raw["dtype"]
    hash(c)


def test_yarn_scales():
    """g(m) = 0.1 m ln(factor) + 1; both mscales absent is HF's rule: g(1) on cos and sin only."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 64
    plain = ModelConfig.from_hf(tiny(rope_parameters=yarn))
    assert plain.rope.attention_factor == pytest.approx(1.1386294)
    assert plain.softmax_scale == 24**-0.5
    both = ModelConfig.from_hf(tiny(rope_parameters=yarn | {"mscale": 2, "mscale_all_dim": 1}))
    assert both.rope.attention_factor == pytest.approx(1.2772589 / 1.1386294)
    assert both.softmax_scale == pytest.approx(24**-0.5 * 1.1386294**2)


@dataclass(frozen=True)
class Spelling:
    """One way to write what a config says, and the values it must resolve to."""

    id: str
    changes: dict[str, Any]
    want: dict[str, Any]


FSSFS = ("full", "shared", "shared", "full", "shared")
SPELLINGS = [
    Spelling("all-full-when-nothing-is-said", {}, {"indexer_types": ("full",) * 5}),
    Spelling("indexer_types", {"indexer_types": list(FSSFS)}, {"indexer_types": FSSFS}),
    Spelling("pattern-string", {"index_topk_pattern": "FSSFS"}, {"indexer_types": FSSFS}),
    Spelling("pattern-list", {"index_topk_pattern": list("FSSFS")}, {"indexer_types": FSSFS}),
    Spelling("pattern-names", {"index_topk_pattern": list(FSSFS)}, {"indexer_types": FSSFS}),
    Spelling(
        "indexer_types-before-pattern-before-freq",
        {"indexer_types": list(FSSFS), "index_topk_pattern": "FFFFF", "index_topk_freq": 2},
        {"indexer_types": FSSFS},
    ),
    Spelling(
        "pattern-before-freq",
        {"index_topk_pattern": "FSSFS", "index_topk_freq": 2},
        {"indexer_types": FSSFS},
    ),
    Spelling(
        "freq-with-the-default-offset",
        {"index_topk_freq": 4, "num_hidden_layers": 10, "mlp_layer_types": ...},
        {"indexer_types": tuple({"F": "full", "S": "shared"}[c] for c in "FFSSSFSSSF")},
    ),
    Spelling(
        "freq-with-offset",
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"indexer_types": ("full", "full", "full", "shared", "full")},
    ),
    Spelling(
        "deepseek-shares-too-when-it-says-so",
        {"model_type": "deepseek_v32", "indexer_types": list(FSSFS)},
        {"indexer_types": FSSFS},
    ),
    Spelling(
        "rope-interleave-default-deepseek",
        {"model_type": "deepseek_v32", "indexer_rope_interleave": ...},
        {"indexer_rope_interleave": False},
    ),
    Spelling(
        "rope-interleave-of-a-relabelled-glm",
        {"model_type": "deepseek_v32", "indexer_rope_interleave": True},
        {"indexer_rope_interleave": True},
    ),
    Spelling(
        "rope-interleave-default-glm",
        {"indexer_rope_interleave": ...},
        {"indexer_rope_interleave": True},
    ),
    Spelling(
        "rope-interleave-off-glm",
        {"indexer_rope_interleave": False},
        {"indexer_rope_interleave": False},
    ),
    Spelling(
        "integral-floats",
        {"vocab_size": 257.0, "index_topk_freq": 2.0, "eos_token_id": [3.0]},
        {
            "vocab_size": 257,
            "indexer_types": ("full", "full", "shared", "full", "shared"),
            "eos_token_ids": (3,),
        },
    ),
    Spelling(
        "ids-of-minus-1-are-none",
        {"bos_token_id": -1, "pad_token_id": -1},
        {"bos_token_id": None, "pad_token_id": None},
    ),
    Spelling("ids-null", {"bos_token_id": None}, {"bos_token_id": None}),
    Spelling(
        "two-names-that-agree", {"num_experts": 8, "num_local_experts": 8}, {"n_routed_experts": 8}
    ),
    Spelling("num_experts", {"n_routed_experts": ..., "num_experts": 16}, {"n_routed_experts": 16}),
    Spelling("torch_dtype", {"dtype": ..., "torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    Spelling("eos-list", {"eos_token_id": [3, 4]}, {"eos_token_ids": (3, 4)}),
    Spelling("eos-zero", {"eos_token_id": 0}, {"eos_token_ids": (0,)}),
    Spelling("eos-null", {"eos_token_id": None}, {"eos_token_ids": ()}),
    Spelling("integer-1", {"routed_scaling_factor": 1}, {"routed_scaling_factor": 1.0}),
    Spelling("latent_norm_eps", {"latent_norm_eps": 1e-5}, {"latent_norm_eps": 1e-5}),
    Spelling(
        "dense-then-sparse",
        {"mlp_layer_types": ..., "first_k_dense_replace": 3},
        {"mlp_layer_types": ("dense", "dense", "dense", "sparse", "sparse")},
    ),
    Spelling(
        "every-other-layer-sparse",
        {"mlp_layer_types": ..., "moe_layer_freq": 2},
        {"mlp_layer_types": ("dense", "dense", "sparse", "dense", "sparse")},
    ),
    Spelling("head_dim-is-ignored", {"head_dim": 192, "qk_head_dim": 7}, {"qk_head_dim": 24}),
    Spelling("unknown-keys-are-tolerated", {"aux_loss_alpha": 0.1, "x": [1]}, {"index_topk": 16}),
    Spelling(
        "layer_types-of-sparse-attention",
        {"layer_types": ["deepseek_sparse_attention"] * 5},
        {"index_topk": 16},
    ),
    Spelling(
        "theta-beside-null-scaling",
        {"rope_parameters": ..., "rope_scaling": None, "rope_theta": 5e5},
        {"rope.rope_theta": 5e5, "rope.rope_type": "default"},
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in SPELLINGS])
def test_spellings(case: Spelling):
    c = ModelConfig.from_hf(tiny(**case.changes))
    for name, value in case.want.items():
        got = getattr(c.rope, name.removeprefix("rope.")) if "." in name else getattr(c, name)
        assert got == value


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Refusal:
    """A config that must not load, and words that its message must have."""

    id: str
    changes: dict[str, Any]
    says: tuple[str, ...] = field(default=())


REFUSALS = [
    Refusal("glm5_next", {"model_type": "glm5_next"}, ("'glm5_next'", "linear attention")),
    Refusal("llama", {"model_type": "llama"}, ("'llama'", "deepseek_v32, glm_moe_dsa")),
    Refusal("deepseek_v3", {"model_type": "deepseek_v3"}, ("no sparse-attention indexer",)),
    Refusal("no-model-type", {"model_type": ...}, ("model_type=None",)),
    Refusal("index_kpool", {"index_kpool": 4}, ("index_kpool=4", "only null")),
    Refusal("layer-0-shared", {"index_topk_pattern": "SFFFF"}, ("layer 0", "make layer 0 'full'")),
    Refusal("pattern-too-short", {"index_topk_pattern": "FS"}, ("names 2 layers", "layers=5")),
    Refusal("pattern-letter", {"index_topk_pattern": "FXSFS"}, ("indexer_types has 'X'",)),
    Refusal("freq-0", {"index_topk_freq": 0}, ("index_topk_freq=0", "1 or more")),
    Refusal("moe-freq-0", {"mlp_layer_types": ..., "moe_layer_freq": 0}, ("moe_layer_freq=0",)),
    Refusal("mlp-type", {"mlp_layer_types": ["dense"] * 4 + ["big"]}, ("mlp_layer_types", "'big'")),
    Refusal("linear-attention", {"layer_types": ["linear_attention"] * 5}, ("'linear_attention'",)),
    Refusal("softmax-router", {"scoring_func": "softmax"}, ("scoring_func='softmax'", "'sigmoid'")),
    Refusal("greedy-router", {"topk_method": "greedy"}, ("topk_method='greedy'", "'noaux_tc'")),
    Refusal("gelu", {"hidden_act": "gelu"}, ("hidden_act='gelu'", "'silu'")),
    Refusal("attention-bias", {"attention_bias": True}, ("attention_bias=True",)),
    Refusal("mlp-bias", {"mlp_bias": True}, ("mlp_bias=True",)),
    Refusal("half-split-mla", {"rope_interleave": False}, ("rope_interleave=False",)),
    Refusal("bf16-router", {"moe_router_dtype": "bfloat16"}, ("moe_router_dtype='bfloat16'",)),
    Refusal("sliding-window", {"sliding_window": 4096}, ("sliding_window=4096",)),
    Refusal("soft-cap", {"final_logit_softcapping": 30.0}, ("final_logit_softcapping=30.0",)),
    Refusal("float16", {"dtype": "float16"}, ("dtype='float16'", "float32 or bfloat16")),
    Refusal("two-mtp", {"num_nextn_predict_layers": 2}, ("num_nextn_predict_layers=2",)),
    Refusal("groups", {"n_group": 3}, ("n_group=3 does not divide n_routed_experts=8",)),
    Refusal("groups-of-one", {"n_group": 8}, ("1 expert in a group", "best two")),
    Refusal("topk_group", {"n_group": 2, "topk_group": 3}, ("topk_group=3 exceeds n_group=2",)),
    Refusal("few-experts", {"n_group": 4, "num_experts_per_tok": 3}, ("exceeds the 2 experts",)),
    Refusal("odd-rope", {"qk_rope_head_dim": 7}, ("qk_rope_head_dim=7 is odd",)),
    Refusal("small-index", {"index_head_dim": 4}, ("index_head_dim=4 is less than",)),
    Refusal("negative", {"kv_lora_rank": -1}, ("kv_lora_rank=-1", "positive integer")),
    Refusal("no-integer", {"index_topk": 2.5}, ("index_topk=2.5",)),
    Refusal("awq", {"quantization_config": {"quant_method": "awq"}}, ("quant_method='awq'",)),
    Refusal("linear-rope", {"rope_parameters": YARN | {"rope_type": "linear"}}, ("'linear'",)),
    Refusal(
        "unknown-rope_scaling",
        {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}},
        ("rope_type='dynamic'",),
    ),
    Refusal("no-theta", {"rope_parameters": ...}, ("rope_theta is missing",)),
    Refusal("two-thetas", {"rope_theta": 3e5}, ("rope_theta is both 1000000.0 and 300000.0",)),
    Refusal(
        "partial-rope",
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        ("partial_rotary_factor=0.5",),
    ),
    Refusal(
        "yarn-without-factor",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        ("needs factor and original_max_position_embeddings",),
    ),
    Refusal("yarn-half", {"rope_parameters": YARN | {"mscale": 1}}, ("only one of mscale",)),
    Refusal(
        "yarn-factor", {"rope_parameters": YARN | {"attention_factor": 2}}, ("attention_factor",)
    ),
    Refusal(
        "missing-fields-all-at-once",
        {"q_lora_rank": None, "index_topk": ..., "n_group": ..., "hidden_act": "gelu"},
        ("q_lora_rank, index_topk, n_group.", "hidden_act='gelu'"),
    ),
    Refusal(
        "no-layer-kinds",
        {"mlp_layer_types": ..., "first_k_dense_replace": ...},
        ("first_k_dense_replace is missing",),
    ),
    Refusal(
        "no-strings-for-numbers",
        {"num_hidden_layers": "3", "index_topk_freq": "4", "rms_norm_eps": "abc"},
        ("num_hidden_layers='3' is no", "index_topk_freq='4' is no", "rms_norm_eps='abc' is no"),
    ),
    Refusal("mtp-string", {"num_nextn_predict_layers": "1"}, ("predict_layers='1' is no integer",)),
    Refusal(
        "first-k-string",
        {"mlp_layer_types": ..., "first_k_dense_replace": "x"},
        ("first_k_dense_replace='x' is no integer",),
    ),
    Refusal("eps-list", {"rms_norm_eps": [1]}, ("rms_norm_eps=[1] is no positive number",)),
    Refusal("eps-negative", {"rms_norm_eps": -1}, ("rms_norm_eps=-1 is no positive number",)),
    Refusal("eps-nan", {"rms_norm_eps": float("nan")}, ("rms_norm_eps=nan",)),
    Refusal(
        "rope-string", {"rope_parameters": "abc"}, ("rope_parameters='abc' is no JSON object",)
    ),
    Refusal(
        "fp8-string", {"quantization_config": "fp8"}, ("quantization_config='fp8' is no JSON",)
    ),
    Refusal(
        "fp8-block", {"quantization_config": {"weight_block_size": 128}}, ("block_size=128 is not",)
    ),
    Refusal("theta-0", {"rope_parameters": {"rope_theta": 0}}, ("rope_theta=0 is no positive",)),
    Refusal("theta-below-0", {"rope_parameters": ..., "rope_theta": -5}, ("rope_theta=-5 is no",)),
    Refusal(
        "theta-string", {"rope_parameters": {"rope_theta": "abc"}}, ("rope_theta='abc' is no",)
    ),
    Refusal(
        "factor-0", {"rope_parameters": YARN | {"factor": 0}}, ("factor=0 is no number from 1",)
    ),
    Refusal("factor-half", {"rope_parameters": YARN | {"factor": 0.5}}, ("factor=0.5 is no",)),
    Refusal(
        "yarn-from-0-positions",
        {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
        ("original_max_position_embeddings=0 is no positive integer",),
    ),
    Refusal(
        "yarn-beta", {"rope_parameters": YARN | {"beta_fast": "32"}}, ("beta_fast='32' is no",)
    ),
    Refusal(
        "yarn-betas",
        {"rope_parameters": YARN | {"beta_fast": 1, "beta_slow": 32}},
        ("beta_fast=1.0 is less than beta_slow=32.0",),
    ),
    Refusal(
        "no-string-switch", {"norm_topk_prob": "false"}, ("norm_topk_prob='false' is no bool",)
    ),
    Refusal("tie-string", {"tie_word_embeddings": "false"}, ("tie_word_embeddings='false' is no",)),
    Refusal(
        "interleave-string", {"indexer_rope_interleave": "false"}, ("interleave='false' is no",)
    ),
    Refusal("eos-string", {"eos_token_id": "</s>"}, ("eos_token_id='</s>' is no token id",)),
    Refusal("eos-negative", {"eos_token_id": [1, -1]}, ("eos_token_id=[1, -1] is no token id",)),
    Refusal("eos-outside", {"eos_token_id": [1, 257]}, ("eos_token_id=257 is outside the vocab",)),
    Refusal(
        "bos-outside", {"bos_token_id": 257}, ("bos_token_id=257 is outside", "vocab_size=257")
    ),
    Refusal("pad-outside", {"pad_token_id": 300}, ("pad_token_id=300 is outside",)),
    Refusal("pad-negative", {"pad_token_id": -2}, ("pad_token_id=-2 is no token id",)),
    Refusal(
        "two-names-that-differ",
        {"num_experts": 16},
        ("n_routed_experts=8 and num_experts=16 are two names of one thing",),
    ),
    Refusal("freq-fraction", {"index_topk_freq": 2.5}, ("index_topk_freq=2.5 is no",)),
    Refusal("freq-negative", {"index_topk_freq": -1}, ("index_topk_freq=-1 is no",)),
    Refusal("too-many-experts", {"num_experts_per_tok": 9}, ("per_tok=9 exceeds the 8 experts",)),
    Refusal("layer-types-string", {"layer_types": "x"}, ("layer_types='x' is no list of strings",)),
    Refusal(
        "indexer-types-string", {"indexer_types": "full"}, ("indexer_types='full' is no list",)
    ),
    Refusal("endless", {"num_hidden_layers": 1e20}, ("num_hidden_layers=1e+20", "1 to 10000")),
    Refusal("no-layers", {"num_hidden_layers": ...}, ("missing or null: num_hidden_layers.",)),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in REFUSALS])
def test_refusals(case: Refusal):
    with pytest.raises(ValueError, match="not supported|cannot be used") as error:
        ModelConfig.from_hf(tiny(**case.changes))
    for words in case.says:
        assert words in str(error.value)


WRONG = ["3", "abc", "", [1], [None], {}, True, 2.5, -5, 10**400, float("inf"), float("nan")]
UNREAD = {
    *("architectures", "attention_dropout", "ep_size", "head_dim", "initializer_range"),
    "num_key_value_heads",
}
NAMED_AS = {
    "index_topk_pattern": "indexer_types",
    "quantization_config": "quantization",
    "torch_dtype": "dtype",
}


def _refusal(raw: dict[str, Any]) -> str:
    try:
        ModelConfig.from_hf(raw)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("raw", [DEEPSEEK_V32, GLM_52], ids=["deepseek_v32", "glm_52"])
def test_any_value_loads_or_is_refused_by_name(raw: dict[str, Any]):
    """Whatever stands in a key, RoPE's included: a model, or one ValueError that names the key."""
    rope = next(key for key in ("rope_scaling", "rope_parameters") if key in raw)
    extra = ("latent_norm_eps", "first_k_dense_replace", "indexer_types", "layer_types")
    for value in WRONG:
        variants = [(key, raw | {key: value}) for key in (*raw, *extra)]
        variants += [(key, raw | {rope: raw[rope] | {key: value}}) for key in raw[rope]]
        for key, changed in variants:
            refusal = _refusal(changed)
            if refusal:
                assert key in refusal or NAMED_AS.get(key, key) in refusal
            else:  # only a key that is not read takes a string
                assert not isinstance(value, str) or key in UNREAD


def test_a_built_config_is_checked_as_a_read_one_is():
    c = ModelConfig.from_hf(tiny())
    assert replace(c, index_topk=8.0).index_topk == 8  # pyright: ignore[reportArgumentType]
    for name, value in (("index_topk", None), ("vocab_size", "3"), ("norm_topk_prob", "false")):
        with pytest.raises(ValueError, match=f"{name}={value!r} is no"):
            replace(c, **{name: value})


def test_a_directory_that_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no config.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        ModelConfig.from_hf(tmp_path)


def test_a_config_does_not_change():
    raw = tiny()
    before = json.dumps(raw)
    c = ModelConfig.from_hf(raw)
    assert json.dumps(raw) == before
    with pytest.raises(FrozenInstanceError):
        c.index_topk = 4  # pyright: ignore[reportAttributeAccessIssue]
