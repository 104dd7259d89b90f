"""generation_config.json: defaults of sampling, and the tokens that end a sequence."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcp_jax.generation_config import GenerationConfig


@dataclass(frozen=True)
class Case:
    id: str
    raw: dict[str, Any]
    eos: tuple[int, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("empty", {}),
    Case(
        "glm-5.2",
        {
            "_from_model_config": True,
            "do_sample": True,
            "eos_token_id": [154820, 154827, 154829],
            "pad_token_id": 154820,
            "temperature": 1.0,
            "top_p": 0.95,
            "transformers_version": "5.0.2",
        },
        (154820, 154827, 154829),
        {"temperature": 1.0, "top_p": 0.95},
    ),
    Case(
        "deepseek-v3.2",
        {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.95},
        (1,),
        {"temperature": 0.6, "top_p": 0.95},
    ),
    Case("greedy", {"do_sample": False, "temperature": 0.6}, (), {"temperature": 0.0}),
    Case("all tokens, as vLLM spells it", {"top_k": -1}, (), {"top_k": 0}),
    Case("nulls", {"eos_token_id": None, "top_p": None}),
    Case(
        "the rest",
        {"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 64},
        (),
        {"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 64},
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_cases(case: Case, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(case.raw))
    for source in (case.raw, tmp_path, str(tmp_path)):
        config = GenerationConfig.from_hf(source)
        assert config.eos_token_ids == case.eos
        assert config.sampling_defaults() == case.defaults


def test_no_file(tmp_path):
    assert GenerationConfig.from_hf(tmp_path) == GenerationConfig()


def test_eos_of_both_files():
    config = GenerationConfig.from_hf({"eos_token_id": [2, 5]})
    assert config.united_eos((1, 2)) == (1, 2, 5)
    assert config.united_eos(()) == (2, 5)
    assert GenerationConfig().united_eos((1,)) == (1,)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -1}, "temperature=-1 is not a number of at least 0.*remove them"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0 is not a number above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 2.5}, "top_k=2.5 is not a count"),
        ({"min_p": 2}, "min_p=2 is not a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is not a number above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not a count of at least 1"),
        ({"eos_token_id": ["</s>"]}, r"eos_token_ids=\('</s>',\) is not token ids"),
        ({"eos_token_id": -2}, r"eos_token_ids=\(-2,\)"),
        ({"eos_token_id": True}, r"eos_token_ids=\(True,\)"),
        ({"top_p": 2, "top_k": -5}, "top_p=2.*; top_k=-5"),
    ],
)
def test_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig.from_hf(raw)
