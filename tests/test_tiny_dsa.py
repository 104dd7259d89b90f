"""Acceptance of the model in the box: it finds what is hidden in up to 8k tokens, at any W.

Until `checkpoints/tiny-dsa` exists, random weights of the same sizes stand in (see the fixture
`tiny_dsa`). Tests marked with `trained` below then hold the mechanics only: that W = 8 answers as
W = 1 does, that text of any kind goes in and out. What the answers *are* is asserted from the day
the checkpoint is there, without a change here. 16k and 32k are for a GPU: `dcp-jax bench passkey
tiny-dsa --lengths 1024 4096 8192 16384 32768 --trials 100`.
"""

from functools import cache

import numpy as np
import pytest

import dcp_jax as dj
from dcp_jax.bench.passkey import Outcome, prompts_of, retrieve, text_model
from dcp_jax.bench.passkey_trials import trials_of
from dcp_jax.config import ModelConfig
from dcp_jax.testing.stand_in import TINY_DSA

DEPTHS = (0.05, 0.5, 0.95)
GREEDY = dj.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TEXTS = ("Straße, 東京, 🙂 и ещё", "\n\n", "a\n\n\n\nb", "\x00\x7f", "e\u0301", "x")


@pytest.fixture(scope="module")
def lengths(tiny_dsa) -> tuple[int, ...]:
    return (1024, 4096, 8192) if tiny_dsa.trained else (1024,)


@pytest.fixture(scope="module")
def open_llm(tiny_dsa, lengths):
    """The model at one dcp_size, opened once."""

    @cache
    def llm(dcp_size: int) -> dj.LLM:
        return dj.LLM(
            tiny_dsa.path,
            tp=dcp_size,
            dcp_size=dcp_size,
            dtype="float32",
            page_size=16,
            max_model_len=lengths[-1] + 64,
            max_running_requests=1,
            # Ranks share one processor in tests: work done once beats work done on each.
            prefill_policy=dj.PrefillPolicy(split_indexer_min_kv=0),
        )

    return llm


@pytest.fixture(scope="module")
def asked(tiny_dsa, open_llm):
    """Outcomes of one trial per depth at a dcp_size, a length and a number of keys, asked once."""
    _, config, tokenizer = text_model(tiny_dsa.path)

    @cache
    def outcomes(dcp_size: int, length: int, keys: int = 1) -> list[Outcome]:
        prompts = prompts_of(trials_of([length], DEPTHS, 1, [keys]), tokenizer, config)
        return list(retrieve(open_llm(dcp_size), prompts, batch=1, progress=False))

    return outcomes


def test_sizes_are_those_of_the_stand_in(tiny_dsa):
    """So that what runs on random weights says something of the trained ones."""
    config, stand_in = ModelConfig.from_hf(tiny_dsa.path), ModelConfig.from_hf(TINY_DSA)
    others = {"dtype", "bos_token_id", "eos_token_ids", "quantization"}
    differing = {
        name
        for name in vars(stand_in)
        if name not in others and getattr(config, name) != getattr(stand_in, name)
    }
    assert not differing
    assert config.vocab_size == 264
    assert "shared" in config.indexer_types
    assert "sparse" in config.mlp_layer_types
    assert config.num_nextn_predict_layers == 1
    assert config.index_head_dim == 128
    assert config.kv_lora_rank % 128 == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_ranks_answer_as_one_does(asked, lengths):
    for length in lengths:
        alone, shared = asked(1, length), asked(8, length)
        assert [o.token_ids for o in shared] == [o.token_ids for o in alone]
        assert all(len(o.token_ids) == 6 for o in alone if o.hit)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dcp_size", [1, 8])
def test_passkeys_are_found(tiny_dsa, asked, lengths, dcp_size):
    outcomes = [outcome for length in lengths for outcome in asked(dcp_size, length)]
    assert len(outcomes) == len(lengths) * len(DEPTHS)
    if tiny_dsa.trained:
        missed = [outcome.record() for outcome in outcomes if not outcome.hit]
        assert not missed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_two_named_keys_the_right_one_is_found(tiny_dsa, asked, lengths):
    outcomes = asked(1, lengths[-1], 2)
    assert all(len(outcome.prompt.document.distractors) > 2 for outcome in outcomes)
    if tiny_dsa.trained:
        missed = [outcome.record() for outcome in outcomes if not outcome.hit]
        assert len(missed) <= len(outcomes) // 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_key_is_selected(tiny_dsa, open_llm, asked, lengths):
    """Each digit is among the selected keys when it is to be said, in two layers at least."""
    llm = open_llm(1)
    assert llm.tokenizer is not None
    outcome = asked(1, lengths[-1])[1]
    document, ids = outcome.prompt.document, list(outcome.prompt.token_ids)
    answer = llm.tokenizer.encode(document.digits, add_special_tokens=False)
    needles = [len(llm.tokenizer.encode(document.text[:start])) for start, _ in document.places]
    for needle in needles:
        assert ids[needle : needle + len(answer)] == answer
    report = llm.explain([*ids, *answer[:-1]], use_tqdm=False)
    found = {
        layer: np.mean(
            [
                any(needle + digit in chosen[len(ids) - 1 + digit] for needle in needles)
                for digit in range(len(answer))
            ]
        )
        for layer, chosen in report.topk_indices.items()
    }
    assert set(found) == set(llm.config.full_layers)
    if tiny_dsa.trained:
        assert sum(share == 1 for share in found.values()) >= 2, found


@pytest.mark.slow
def test_text_of_any_kind(open_llm):
    one = open_llm(1).generate([*TEXTS, [7]], GREEDY, use_tqdm=False)
    eight = open_llm(8).generate([TEXTS[0], [7]], GREEDY, use_tqdm=False)
    tokenizer = open_llm(1).tokenizer
    assert tokenizer is not None
    for text, output in zip(TEXTS, one, strict=False):
        assert tokenizer.decode(output.prompt_token_ids) == text
    assert one[-1].prompt_token_ids == [7]
    assert all(len(output.outputs[0].token_ids) == 4 for output in one)
    for a, b in zip((one[0], one[-1]), eight, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids


@pytest.mark.slow
def test_chat(tiny_dsa, open_llm):
    llm = open_llm(1)
    messages = [{"role": "user", "content": "The pass key is 40172. What is the pass key?"}]
    ids = llm.chat_prompt(messages)["prompt_token_ids"]
    names = [llm.tokenizer.token_id(f"<|{name}|>") for name in ("bos", "user", "assistant")]
    assert [ids[0], ids[1], ids[-1]] == names
    params = dj.SamplingParams(temperature=0.0, max_tokens=32)
    (answer,) = llm.chat(messages, params, use_tqdm=False)
    if tiny_dsa.trained:
        assert "40172" in answer.outputs[0].text
        assert answer.outputs[0].finish_reason == "stop"
