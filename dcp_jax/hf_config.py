"""Reading of Hugging Face's `config.json`: what it spells in several ways, in one form.

`resolve` returns the values by Hugging Face's names, with aliases, IndexShare, dense and sparse
layers, end-of-sequence ids and RoPE resolved, and a list of problems, one clause each.

Every key that is read has a kind (`_KINDS`, `_ROPE_KINDS`), which says what values it may have; a
value is held against it once, by `read`, before anything looks at it. An integer that a JSON writer
made a float (3.0) is that integer; a string is never a number or a switch.

A key that this file does not know is tolerated, as configs are full of training leftovers, but a
key known to change the maths is a problem unless it has the value implemented (`_CHANGES_MATHS`):
a model that would run and be quietly wrong must not run. `head_dim`, `qk_head_dim` and
`num_key_value_heads` are ignored: released configs carry misleading values, and nothing here
depends on them.
"""

import json
import sys
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

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
    "eos_token_ids": ("eos_token_id",),
}

_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")


class _Kind(NamedTuple):
    """What values a key may have: in words, how to correct one, and the value in its one form.

    `form` returns None for a value that is not of the kind.
    """

    what: str
    fix: str
    form: Callable[[Any], Any]


def _integer(least: int, most: int = 2**31 - 1) -> Callable[[Any], int | None]:
    def form(value: Any) -> int | None:
        if type(value) is float and value.is_integer():
            value = int(value)
        return value if type(value) is int and least <= value <= most else None

    return form


def _number(least: float) -> Callable[[Any], float | None]:
    def form(value: Any) -> float | None:
        known = type(value) in (int, float) and least <= value <= sys.float_info.max
        return float(value) if known else None

    return form


def _token_ids(value: Any) -> tuple[int, ...] | None:
    listed = value if isinstance(value, list | tuple) else (value,)
    ids = tuple(token for token in map(_integer(0), listed) if token is not None)
    return ids if len(ids) == len(listed) else None


def _strings(value: Any) -> tuple[str, ...] | None:
    known = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return tuple(value) if known else None


_SIZE = _Kind("positive integer that int32 holds", "use 1 or more", _integer(1))
_LAYERS = _Kind("number of layers", "use an integer from 1 to 10000", _integer(1, 10_000))
_COUNT = _Kind("integer from 0 on that int32 holds", "use 0 or more", _integer(0))
_POSITIVE = _Kind("positive number", "use a finite one above 0", _number(sys.float_info.min))
_FROM_0 = _Kind("number from 0 on", "use a finite one of 0 or more", _number(0))
_FROM_1 = _Kind("number from 1 on", "use a finite one of 1 or more", _number(1))
_SWITCH = _Kind("boolean", "use true or false", lambda v: v if isinstance(v, bool) else None)
_ID = _Kind("token id", "use an integer of 0 or more, or null", _integer(0))
_IDS = _Kind("token id, nor a list of them", "use integers of 0 or more, or null", _token_ids)
_NAME = _Kind("string", "use a name", lambda v: v if isinstance(v, str) else None)
_NAMES = _Kind("list of strings", "name each layer's kind", _strings)
_PATTERN = _Kind(
    "string of F and S, one a layer, nor a list of them",
    "write one",
    lambda v: _strings(list(v) if isinstance(v, str) else v),
)
_OBJECT = _Kind(
    "JSON object",
    "use the released config's",
    lambda v: dict(v) if isinstance(v, Mapping) else None,
)

_KINDS = {
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_n_heads"),
            *("index_head_dim", "index_topk", "intermediate_size", "moe_intermediate_size"),
            *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group"),
            *("topk_group", "max_position_embeddings", "index_topk_freq", "moe_layer_freq"),
        ),
        _SIZE,
    ),
    "num_hidden_layers": _LAYERS,
    "num_nextn_predict_layers": _COUNT,
    "first_k_dense_replace": _COUNT,
    "index_skip_topk_offset": _COUNT,
    "routed_scaling_factor": _POSITIVE,
    "rms_norm_eps": _POSITIVE,
    "latent_norm_eps": _POSITIVE,
    "norm_topk_prob": _SWITCH,
    "tie_word_embeddings": _SWITCH,
    "indexer_rope_interleave": _SWITCH,
    "index_share_for_mtp_iteration": _SWITCH,
    "bos_token_id": _ID,
    "pad_token_id": _ID,
    "eos_token_ids": _IDS,
    "dtype": _NAME,
    "indexer_types": _NAMES,
    "mlp_layer_types": _NAMES,
    "layer_types": _NAMES,
    "index_topk_pattern": _PATTERN,
    "rope_parameters": _OBJECT,
    "rope_scaling": _OBJECT,
    "quantization": _OBJECT,
}
_KINDS |= {alias: _KINDS[name] for name, aliases in _ALIASES.items() for alias in aliases}

_YARN_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ROPE_KINDS = {"rope_theta": _POSITIVE}
_YARN_KINDS = {
    **_ROPE_KINDS,
    **dict.fromkeys(_YARN_OPTIONS, _FROM_0),
    "factor": _FROM_1,
    "original_max_position_embeddings": _SIZE,
    "truncate": _SWITCH,
}


def read(
    values: Mapping[str, Any], problems: list[str], kinds: Mapping[str, _Kind] = _KINDS
) -> dict[str, Any]:
    """The values that have a kind, each in its one form; a wrong one is None and a problem."""
    given = {key: (kind, values[key]) for key, kind in kinds.items() if key in values}
    formed = {key: kind.form(value) for key, (kind, value) in given.items()}
    problems += [
        f"{key}={value!r} is no {kind.what}: {kind.fix}"
        for key, (kind, value) in given.items()
        if formed[key] is None
    ]
    return formed


def resolve(
    source: str | PathLike[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """The values of a checkpoint directory's `config.json` (or of its dict), and the problems.

    `rope` is a dict of RopeConfig's arguments. A value that the config leaves out, or has null,
    is absent; one that is wrong, and so a problem, is None. A `model_type` that is not supported
    raises at once: nothing else matters then.
    """
    raw = source if isinstance(source, Mapping) else _read_json(Path(source))
    _check_model_type(raw)
    values = {key: value for key, value in raw.items() if value is not None}
    for key in ("bos_token_id", "pad_token_id"):
        if values.get(key) == -1:  # older writers' null
            del values[key]
    problems: list[str] = []
    values |= read(values, problems)
    for name, aliases in _ALIASES.items():
        given = [key for key in (name, *aliases) if key in values]
        if given:
            values[name] = values[given[0]]
        for other in given[1:]:
            if None not in (values[name], values[other]) and values[name] != values[other]:
                problems.append(
                    f"{given[0]}={raw[given[0]]!r} and {other}={raw[other]!r} are two names of "
                    "one thing: keep one"
                )
    problems += _unsupported(values)
    values.setdefault("indexer_rope_interleave", values["model_type"] == "glm_moe_dsa")
    values |= {
        "rope": _rope(values, problems),
        "indexer_types": _indexer_types(values),
        "mlp_layer_types": _mlp_layer_types(values, problems),
    }
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
    for kind in sorted(set(values.get("layer_types") or ()) - set(_LAYER_TYPES)):
        problems.append(
            f"layer_types has {kind!r}, but only sparse attention is implemented: "
            f"{' or '.join(_LAYER_TYPES)}"
        )
    return problems


def _rope(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """RopeConfig's arguments from `rope_parameters`, or `rope_scaling` beside `rope_theta`."""
    parts = [values[key] for key in ("rope_scaling", "rope_parameters") if key in values]
    if None in parts:  # what a wrong one meant to say is not known
        return None
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
    if given.get("partial_rotary_factor", 1) != 1:
        problems.append(
            f"partial_rotary_factor={given['partial_rotary_factor']!r} is not implemented: RoPE "
            "turns all of qk_rope_head_dim, so only 1 is"
        )
    if rope_type == "default":
        return {"rope_type": rope_type, **read(given, problems, _ROPE_KINDS)}
    return {"rope_type": rope_type, **_yarn(given, problems)}


def _yarn(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    required = ("factor", "original_max_position_embeddings")
    absent = [name for name in required if name not in given]
    if absent:
        problems.append(f"rope_type='yarn' needs {' and '.join(absent)}: add it")
    yarn = read(given, problems, _YARN_KINDS)
    if "attention_factor" in given or yarn.pop("truncate", True) is False:
        problems.append(
            "rope_type='yarn' with attention_factor or truncate=false is not implemented: mscale "
            "and mscale_all_dim set the factor"
        )
    # With only one of the two, implementations disagree about the factor of cos and sin.
    if bool(given.get("mscale")) != bool(given.get("mscale_all_dim")):
        problems.append("rope_type='yarn' has only one of mscale and mscale_all_dim: give both")
    # An option's zero stands for "not given", as in the reference.
    return {key: value for key, value in yarn.items() if value or key not in _YARN_OPTIONS}


def _indexer_types(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    """IndexShare: by name, by a pattern of F and S, or by frequency and offset."""
    if "indexer_types" in values:
        return values["indexer_types"]
    if "index_topk_pattern" in values:
        names = {"F": "full", "S": "shared"}
        pattern: tuple[str, ...] | None = values["index_topk_pattern"]
        return None if pattern is None else tuple(names.get(kind, kind) for kind in pattern)
    freq, offset = values.get("index_topk_freq", 1), values.get("index_skip_topk_offset", 2)
    layers = values.get("num_hidden_layers")
    if freq is None or offset is None or layers is None:
        return None
    return tuple(
        "shared" if max(layer - offset + 1, 0) % freq else "full" for layer in range(layers)
    )


def _mlp_layer_types(values: Mapping[str, Any], problems: list[str]) -> tuple[str, ...] | None:
    """Dense and sparse layers: by name, or dense up to a layer and sparse by frequency after."""
    if "mlp_layer_types" in values:
        return values["mlp_layer_types"]
    if "first_k_dense_replace" not in values:
        problems.append("first_k_dense_replace is missing, and so is mlp_layer_types: add one")
        return None
    first, freq = values["first_k_dense_replace"], values.get("moe_layer_freq", 1)
    layers = values.get("num_hidden_layers")
    if first is None or freq is None or layers is None:
        return None
    return tuple("dense" if layer < first or layer % freq else "sparse" for layer in range(layers))
