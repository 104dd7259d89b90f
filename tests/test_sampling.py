"""Sampling as a user meets it: seeds, stops, streams, log-probabilities, chat."""

import json
import shutil

import numpy as np
import pytest

import dcp_jax as dj
from dcp_jax.engine.knobs import knobs_of, sampler_of
from dcp_jax.engine.slots import EDITS

PROMPT = "Where is the needle?"
OTHERS = ["x", "a longer prompt than the others", "??", "0123456789", "z" * 20, "ab", "end"]


@pytest.fixture(scope="module")
def directory(golden, tmp_path_factory):
    """p3 with a byte tokenizer: 256 bytes and one token of its own."""
    path = tmp_path_factory.mktemp("bytes")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden("p3").path / name, path)
    tokenizer = {"tokenizer_class": "ByteTokenizer", "special_tokens": ["<|eos|>"]}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    defaults = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [256, 255]}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


@pytest.fixture(scope="module")
def llm(directory):
    return dj.LLM(directory, dtype="float32", page_size=16)


def sampled(**changes):
    return dj.SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 7} | changes)


def completions(llm, prompts, params):
    return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(llm):
    (alone,) = completions(llm, PROMPT, sampled())
    together = completions(llm, [*OTHERS[:3], PROMPT, *OTHERS[3:]], sampled())
    assert together[3] == alone
    assert completions(llm, PROMPT, sampled())[0] == alone
    assert completions(llm, PROMPT, sampled(seed=8))[0].token_ids != alone.token_ids


def test_without_a_seed_requests_differ(llm):
    first, second = completions(llm, [PROMPT] * 2, sampled(seed=None))
    assert first.token_ids != second.token_ids


def test_n_continuations_are_different_draws(llm):
    (out,) = llm.generate(PROMPT, sampled(n=3), use_tqdm=False)
    assert [c.index for c in out.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in out.outputs}) == 3
    assert out.outputs[0].token_ids == completions(llm, PROMPT, sampled())[0].token_ids


def test_stream_pieces_join_to_what_generate_returns(llm):
    params = sampled(n=2, max_tokens=24)
    (out,) = llm.generate(PROMPT, params, use_tqdm=False)
    pieces = list(llm.stream(PROMPT, params))
    for whole in out.outputs:
        mine = [p for p in pieces if p.index == whole.index]
        assert "".join(p.text for p in mine) == whole.text
        assert [t for p in mine for t in p.token_ids] == whole.token_ids
        assert [p.finish_reason for p in mine] == [None] * (len(mine) - 1) + ["length"]


def test_an_abandoned_stream_gives_its_pages_back(llm):
    stream = llm.stream(PROMPT, sampled())
    next(stream)
    stream.close()
    check_pages(llm)


def check_pages(llm):
    while llm.engine.busy:
        llm.engine.step()
    assert llm.engine.scheduler.pool.available == llm.capacity.pages
    llm.engine.scheduler.check()


def test_streams_and_generate_share_the_engine(llm):
    """Two streams in turns, and a call in between, give what each gives alone."""
    whole = [llm.generate(p, sampled(), use_tqdm=False)[0].outputs[0].text for p in OTHERS[:3]]
    streams = [llm.stream(prompt, sampled()) for prompt in OTHERS[:2]]
    texts = [next(stream).text for stream in streams]
    assert completions(llm, OTHERS[2], sampled())[0].text == whole[2]
    for i, stream in enumerate(streams):
        texts[i] += "".join(piece.text for piece in stream)
    assert texts == whole[:2]
    check_pages(llm)


@pytest.fixture(scope="module")
def ascii_text(llm):
    """A biased draw of printable characters, long enough to stop in."""
    bias = dict.fromkeys(range(97, 123), 30.0)
    params = sampled(max_tokens=24, logit_bias=bias)
    (completion,) = completions(llm, PROMPT, params)
    assert completion.text.isalpha()
    assert len(completion.text) == 24
    return completion.text, bias


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_tokens(llm, ascii_text, include):
    text, bias = ascii_text
    stop = text[9:12]
    cut = text.find(stop)
    params = sampled(
        max_tokens=24, logit_bias=bias, stop=[stop, "NEVER"], include_stop_str_in_output=include
    )
    (completion,) = completions(llm, PROMPT, params)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: cut + (3 if include else 0)]
    assert len(completion.token_ids) == cut + 3
    shown = ""
    for piece in llm.stream(PROMPT, params):
        shown += piece.text
        assert completion.text.startswith(shown), "nothing is taken back"
    assert shown == completion.text


def test_stop_token_ids_and_min_tokens(llm, ascii_text):
    text, bias = ascii_text
    stop = ord(text[4])
    at = text.find(text[4])
    params = sampled(max_tokens=24, logit_bias=bias, stop_token_ids=[stop])
    (completion,) = completions(llm, PROMPT, params)
    assert (completion.stop_reason, completion.text) == (stop, text[:at])
    assert completion.token_ids == [ord(c) for c in text[: at + 1]]
    longer = sampled(
        max_tokens=24, min_tokens=24, logit_bias=bias, stop_token_ids=[stop], stop=[text[9:12]]
    )
    (completion,) = completions(llm, PROMPT, longer)
    assert len(completion.token_ids) == 24
    assert stop not in completion.token_ids


def test_eos_of_both_configs_and_ignore_eos(llm):
    assert set(llm.eos_token_ids) == {1, 255, 256}
    params = sampled(max_tokens=8, logit_bias={255: 100.0}, ignore_eos=False)
    (completion,) = completions(llm, PROMPT, params)
    assert (completion.token_ids, completion.text) == ([255], "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    (going_on,) = completions(llm, PROMPT, sampled(max_tokens=3, logit_bias={255: 100.0}))
    assert going_on.token_ids == [255] * 3
    assert going_on.text == "\ufffd" * 3


def test_penalties_change_the_text(llm):
    greedy = {"temperature": 0.0, "max_tokens": 24, "logit_bias": {65: 100.0, 66: 85.0}}
    (stuck,) = completions(llm, PROMPT, sampled(**greedy))
    assert set(stuck.token_ids) == {65}
    (free,) = completions(llm, PROMPT, sampled(**greedy, frequency_penalty=2.0))
    assert set(free.token_ids) == {65, 66}


def test_logprobs_are_those_of_the_models_own_logits(llm):
    params = sampled(logprobs=3, prompt_logprobs=2, max_tokens=5, top_k=2)
    (out,) = llm.generate(PROMPT, params, use_tqdm=False)
    (completion,) = out.outputs
    ids = out.prompt_token_ids + completion.token_ids
    logits = llm.score(ids).astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    start = len(out.prompt_token_ids)
    for i, entry in enumerate(completion.logprobs):
        check_entry(entry, completion.token_ids[i], want[start + i - 1], 3)
    total = sum(
        e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == start
    for i, entry in enumerate(out.prompt_logprobs[1:], 1):
        check_entry(entry, ids[i], want[i - 1], 2)


def check_entry(entry, token, logprobs, count):
    best = np.argsort(-logprobs, kind="stable")
    assert list(entry)[:count] == best[:count].tolist()
    assert set(entry) == {*best[:count].tolist(), token}
    for key, value in entry.items():
        assert value.logprob == pytest.approx(logprobs[key], abs=1e-4)
        assert value.rank == 1 + int((logprobs > logprobs[key]).sum())
        assert value.decoded_token == bytes([key]).decode("utf-8", "replace")


def test_defaults_of_the_checkpoint(llm):
    params = llm.default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, 16)


def test_chat_renders_the_models_own_format(llm):
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.chat_prompt(messages, enable_thinking=False)["prompt_token_ids"]
    text = bytes(prompt).decode()
    assert text == "[gMASK]<sop><|user|>hi<|assistant|></think>"
    (out,) = llm.chat(messages, sampled(max_tokens=2), use_tqdm=False, enable_thinking=False)
    assert (out.prompt_token_ids, len(out.outputs[0].token_ids)) == (prompt, 2)
    assert len(llm.chat([messages, messages], sampled(max_tokens=1), use_tqdm=False)) == 2
    with pytest.raises(ValueError, match="wizard"):
        llm.chat([{"role": "wizard", "content": "hi"}])


def test_pieces_carry_logprobs_and_prompt_logprobs_are_refused(llm):
    params = sampled(logprobs=2, max_tokens=5, top_k=2)
    (out,) = llm.generate(PROMPT, params, use_tqdm=False)
    streamed = [e for piece in llm.stream(PROMPT, params) for e in piece.logprobs]
    assert streamed == out.outputs[0].logprobs
    with pytest.raises(ValueError, match="prompt_logprobs=1 are not streamed"):
        llm.stream(PROMPT, sampled(prompt_logprobs=1))


def test_a_stream_whose_caches_were_lost_goes_on(llm):
    (want,) = completions(llm, PROMPT, sampled())
    stream = llm.stream(PROMPT, sampled())
    text = next(stream).text
    llm.engine.runner.reset()
    assert text + "".join(piece.text for piece in stream) == want.text
    check_pages(llm)


def test_values_of_other_engines():
    """vLLM's None for none, a top_k beyond every vocabulary, a temperature that is none."""
    params = dj.SamplingParams(stop=None, stop_token_ids=None, top_k=2**40, temperature=1e-38)
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert sampler_of(params) == "greedy"
    hot = dj.SamplingParams(top_k=2**40)
    assert sampler_of(hot) == "drawn"
    assert knobs_of(hot, seed=2**32 - 1, prompt_tokens=1).ints.tolist() == [2**31 - 1, -1]


def test_more_edited_tokens_than_a_slot_holds():
    params = dj.SamplingParams(logit_bias=dict.fromkeys(range(EDITS), 1.0), min_tokens=1)
    with pytest.raises(ValueError, match=f"{EDITS} tokens and min_tokens bans 1 ends: at most"):
        knobs_of(params, seed=0, prompt_tokens=1, eos_token_ids=(3,))


REFUSED = [
    ({"stop": 5}, "stop=5"),
    ({"max_tokens": "5"}, "max_tokens='5'"),
    ({"logit_bias": [1]}, "logit_bias="),
    ({"n": 0}, "n=0"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"top_k": -2}, "top_k=-2"),
    ({"min_p": 2.0}, "min_p=2.0"),
    ({"seed": -1}, "seed=-1"),
    ({"presence_penalty": 3.0}, "presence_penalty=3.0"),
    ({"frequency_penalty": -3.0}, "frequency_penalty=-3.0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": 2.5}, "max_tokens=2.5"),
    ({"max_tokens": True}, "max_tokens=True"),
    ({"min_tokens": 20}, "min_tokens=20, above max_tokens=16"),
    ({"stop": [""]}, "non-empty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {3: 101.0}}, "101.0"),
    ({"logprobs": 21}, "logprobs=21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    ({"top_p": 2.0, "n": -1}, "n=-1.*top_p=2.0"),
]


@pytest.mark.parametrize(("values", "says"), REFUSED)
def test_parameters_are_refused_by_name_and_value(values, says):
    with pytest.raises(ValueError, match=says):
        dj.SamplingParams(**values)


@pytest.mark.parametrize("values", [{"stop_token_ids": [257]}, {"logit_bias": {999: 1.0}}])
def test_tokens_outside_the_vocabulary_are_refused(llm, values):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate(PROMPT, dj.SamplingParams(**values))


def test_stop_strings_need_a_tokenizer(golden):
    llm = dj.LLM(golden("p3").path, page_size=16)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate([1, 2], dj.SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
