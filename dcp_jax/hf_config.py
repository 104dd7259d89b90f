"""Reading of Hugging Face's `config.json`: what it spells in several ways, in one form.

`resolve` returns the values by Hugging Face's names, with aliases, IndexShare, dense and sparse
layers, end-of-sequence ids and RoPE resolved, and a list of problems, one clause each.

A key that this file does not know is tolerated, as configs are full of training leftovers, but a
key known to change the maths is a problem unless it has the value implemented (`_CHANGES_MATHS`):
a model that would run and be quietly wrong must not run. `head_dim`, `qk_head_dim` and
`num_key_value_heads` are ignored: released configs carry misleading values, and nothing here
depends on them.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")

_OTHER_MODEL_TYPES = {
    "glm5_next": "it has linear attention, RoPE-free MLA, a k-pooled indexer, hyper-connections "
    "and vision, none of which is implemented",
    "deepseek_v2": "it has no sparse-attention indexer",
    "deepseek_v3": "it has no sparse-attention indexer",
}

# Keys that must be null, absent or one of these: any other value changes what the model computes.
_CHANGES_MATHS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleave": (True,),
    "moe_router_dtype": ("float32", "fp32"),
    "partial_rotary_factor": (1,),
    "use_qk_norm": (False,),
    "logit_scale": (1,),
    "sliding_window": (),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "index_kpool": (),
}

# Other names under which a field may stand.
_ALIASES = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "dtype": ("torch_dtype",),
    "quantization": ("quantization_config",),
}

_FLOATS = ("routed_scaling_factor", "rms_norm_eps", "latent_norm_eps")  # JSON may say 1 for 1.0
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
_YARN_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def resolve(
    source: str | PathLike[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """The values of a checkpoint directory's `config.json` (or of its dict), and the problems.

    `rope` is a dict of RopeConfig's arguments. A value that the config leaves out, or has null,
    is absent. A `model_type` that is not supported raises at once: nothing else matters then.
    """
    raw = source if isinstance(source, Mapping) else _read_json(Path(source))
    _check_model_type(raw)
    values = {key: value for key, value in raw.items() if value is not None}
    for name, aliases in _ALIASES.items():
        for alias in aliases:
            if alias in values:
                values.setdefault(name, values[alias])
    values |= {key: float(values[key]) for key in _FLOATS if key in values}
    problems = _unsupported(values)
    values.setdefault("indexer_rope_interleave", values["model_type"] == "glm_moe_dsa")
    eos = values.get("eos_token_id", ())
    values["eos_token_ids"] = (eos,) if isinstance(eos, int) else tuple(eos)
    for name, value in (
        ("rope", _rope(values, problems)),
        ("indexer_types", _indexer_types(values, problems)),
        ("mlp_layer_types", _mlp_layer_types(values, problems)),
    ):
        if value is not None:
            values[name] = value
    return values, problems


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{directory} holds no config.json: give a Hugging Face checkpoint directory."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch it again.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, not a JSON object: fetch it again.")
    return raw


def _check_model_type(raw: Mapping[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        why = _OTHER_MODEL_TYPES.get(str(model_type), "it is another architecture")
        raise ValueError(
            f"model_type={model_type!r} is not supported: {why}; use a checkpoint whose model_type "
            f"is one of {', '.join(MODEL_TYPES)}."
        )


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    """What the config asks for that would change the maths."""
    problems = []
    for key, allowed in _CHANGES_MATHS.items():
        if key in values and values[key] not in allowed:
            only = " or ".join(map(repr, allowed)) or "null"
            problems.append(
                f"{key}={values[key]!r} changes what the model computes and is not implemented: "
                f"only {only} is"
            )
    for kind in sorted(set(values.get("layer_types", ())) - set(_LAYER_TYPES)):
        problems.append(
            f"layer_types has {kind!r}, but only sparse attention is implemented: "
            f"{' or '.join(_LAYER_TYPES)}"
        )
    return problems


def _rope(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """RopeConfig's arguments from `rope_parameters`, or `rope_scaling` beside `rope_theta`."""
    parts = [values[key] for key in ("rope_scaling", "rope_parameters") if values.get(key)]
    if "rope_theta" in values:
        parts.append({"rope_theta": values["rope_theta"]})
    given: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            key = "rope_type" if key == "type" else key
            if value is not None and given.setdefault(key, value) != value:
                problems.append(
                    f"{key} is both {given[key]!r} and {value!r} among rope_parameters, "
                    "rope_scaling and rope_theta: keep one"
                )
    rope_type = given.get("rope_type", "default")
    if rope_type not in ("default", "yarn"):
        problems.append(
            f"rope_type={rope_type!r} is not implemented: the released models have 'default' "
            "or 'yarn'"
        )
        return None
    if "rope_theta" not in given:
        problems.append("rope_theta is missing, at the top level and in rope_parameters: add it")
        return None
    rope = {"rope_type": rope_type, "rope_theta": float(given["rope_theta"])}
    if given.get("partial_rotary_factor", 1) != 1:
        problems.append(
            f"partial_rotary_factor={given['partial_rotary_factor']} is not implemented: RoPE "
            "turns all of qk_rope_head_dim, so only 1 is"
        )
    return rope if rope_type == "default" else rope | _yarn(given, problems)


def _yarn(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    required = ("factor", "original_max_position_embeddings")
    absent = [name for name in required if name not in given]
    if absent:
        problems.append(f"rope_type='yarn' needs {' and '.join(absent)}: add it")
    if "attention_factor" in given or not given.get("truncate", True):
        problems.append(
            "rope_type='yarn' with attention_factor or truncate=false is not implemented: mscale "
            "and mscale_all_dim set the factor"
        )
    # With only one of the two, implementations disagree about the factor of cos and sin.
    if bool(given.get("mscale")) != bool(given.get("mscale_all_dim")):
        problems.append("rope_type='yarn' has only one of mscale and mscale_all_dim: give both")
    # A zero stands for "not given", as in the reference.
    yarn = {key: float(given[key]) for key in ("factor", *_YARN_OPTIONS) if given.get(key)}
    return yarn | {key: given[key] for key in required[1:] if key in given}


def _indexer_types(values: Mapping[str, Any], problems: list[str]) -> tuple[str, ...] | None:
    """IndexShare: by name, by a pattern of F and S, or by frequency and offset."""
    if "indexer_types" in values:
        return tuple(values["indexer_types"])
    if "index_topk_pattern" in values:
        names = {"F": "full", "S": "shared"}
        return tuple(names.get(str(kind), str(kind)) for kind in values["index_topk_pattern"])
    freq, offset = values.get("index_topk_freq", 1), values.get("index_skip_topk_offset", 2)
    if freq < 1:
        problems.append(f"index_topk_freq={freq} is no number of layers: use 1 or more")
        return None
    return tuple(
        "shared" if max(layer - offset + 1, 0) % freq else "full"
        for layer in range(values.get("num_hidden_layers", 0))
    )


def _mlp_layer_types(values: Mapping[str, Any], problems: list[str]) -> tuple[str, ...] | None:
    """Dense and sparse layers: by name, or dense up to a layer and sparse by frequency after."""
    if "mlp_layer_types" in values:
        return tuple(values["mlp_layer_types"])
    freq = values.get("moe_layer_freq", 1)
    if not isinstance(freq, int) or freq < 1:
        problems.append(f"moe_layer_freq={freq!r} is no number of layers: use 1 or more")
        return None
    if "first_k_dense_replace" not in values:
        problems.append("first_k_dense_replace is missing, and so is mlp_layer_types: add one")
        return None
    return tuple(
        "dense" if layer < values["first_k_dense_replace"] or layer % freq else "sparse"
        for layer in range(values.get("num_hidden_layers", 0))
    )
