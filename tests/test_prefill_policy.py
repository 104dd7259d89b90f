"""Prefill paths as a user of `LLM` meets them: defaults, choices per call, and what is refused."""

import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import dcp_jax as dj
from dcp_jax.dcp.traffic import collectives
from dcp_jax.engine.paths import parallelism, prefill_options
from dcp_jax.engine.runner import Row
from dcp_jax.testing.checkpoints import write_random_checkpoint
from dcp_jax.testing.harness import open_runner, tiny_config

MHA, OWNED = dj.PrefillPath.MHA_ONE_SHOT, dj.PrefillPath.OWNED
GATHERED, SPLIT = dj.PrefillPath.GATHERED, dj.PrefillPath.GATHERED_SPLIT_INDEXER
K = 16  # index_topk of p3


@pytest.fixture(scope="module")
def p3(golden):
    return golden("p3")


@pytest.fixture(scope="module", params=[1, 4])
def llm(request, p3):
    W = request.param
    return dj.LLM(p3.path, tp=W, dcp_size=W, dtype="float32", page_size=2)


@pytest.fixture(scope="module")
def ids(p3) -> list[int]:
    return p3.arrays["input_ids"][0, :40].tolist()


def generate(llm, prompt, **options) -> list[int]:
    params = dj.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    (out,) = llm.generate([prompt], params, use_tqdm=False, **options)
    return out.outputs[0].token_ids


@pytest.mark.parametrize("tokens", [1, K])
def test_a_short_prompt_is_dense_by_default(llm, ids, tokens):
    report = llm.explain(ids[:tokens])
    assert report.prefill_path is MHA
    ranks = llm.engine.runner.dcp_size
    token = np.arange(tokens)[:, None]
    everything = np.where(np.arange(K) <= token, np.arange(K), -1)
    for layer in (0, 1, 3):
        np.testing.assert_array_equal(report.topk_indices[layer], everything)
        owned = report.owned_counts[layer]
        assert owned.shape == (ranks, tokens)
        for rank in range(ranks):
            mine = (everything >= 0) & (everything % ranks == rank)
            np.testing.assert_array_equal(owned[rank], mine.sum(axis=-1))
    assert set(report.bytes_exchanged) <= {"argmax", "tp_sum"}


def test_a_longer_prompt_is_not(llm, ids):
    path = OWNED if llm.engine.runner.dcp_size == 1 else GATHERED
    assert llm.explain(ids[: K + 1]).prefill_path is path


def test_a_call_may_choose(llm, ids):
    """Every way in; the answers are those of the default path."""
    short, owned = ids[:12], dj.PrefillPolicy(force="owned")
    assert llm.explain(short, prefill_policy=owned).prefill_path is OWNED
    assert llm.explain(short).prefill_path is MHA
    asked = []
    step = llm.engine.runner.step

    def spy(rows, **how):
        asked.extend([how["path"]] if "path" in how else [])
        return step(rows, **how)

    expected = generate(llm, short)
    logits = llm.score(short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "step", spy)
        assert generate(llm, short, prefill_policy=owned) == expected
        np.testing.assert_allclose(llm.score(short, prefill_policy=owned), logits, atol=2e-4)
        params = dj.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        pieces = list(llm.stream(short, params, prefill_policy=owned))
        assert [token for piece in pieces for token in piece.token_ids] == expected
    assert asked == [OWNED] * 3


@pytest.mark.slow
def test_chat_may_choose(p3, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(p3.path / name, tmp_path)
    tokenizer = {"tokenizer_class": "ByteTokenizer", "special_tokens": ["<|eos|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    llm = dj.LLM(tmp_path, dtype="float32", page_size=16)
    with pytest.raises(ValueError, match="prefill.force='gathered': with dcp_size=1"):
        llm.chat(
            [{"role": "user", "content": "hi"}], prefill_policy=dj.PrefillPolicy(force="gathered")
        )


def no_step(*_, **__):
    pytest.fail("something ran")


@pytest.mark.parametrize("call", ["generate", "stream", "score", "explain"])
def test_a_forced_path_that_cannot_be_taken_is_refused(llm, ids, call, monkeypatch):
    """Before anything runs, in one sentence; whoever forces it."""
    monkeypatch.setattr(llm.engine.runner, "step", no_step)
    policy = dj.PrefillPolicy(force=MHA)
    says = rf"^prefill.force='mha_one_shot': 17 keys are more than index_topk={K}.*\.$"
    with pytest.raises(ValueError, match=says) as refusal:
        getattr(llm, call)(ids[: K + 1], prefill_policy=policy)
    assert "\n" not in str(refusal.value)
    monkeypatch.setattr(llm.engine, "policy", policy)
    with pytest.raises(ValueError, match=says):
        getattr(llm, call)(ids[: K + 1])
    with pytest.raises(ValueError, match="prefill_policy='owned' is not a PrefillPolicy"):
        getattr(llm, call)(ids[:3], prefill_policy="owned")


@pytest.mark.parametrize("path", [GATHERED, SPLIT])
def test_one_rank_gathers_nothing(p3, ids, path):
    alone = dj.LLM(p3.path, dtype="float32", page_size=16)
    with pytest.raises(ValueError, match="dcp_size=1 the one rank owns every row"):
        alone.generate([ids[:3]], prefill_policy=dj.PrefillPolicy(force=path))


def test_dense_beyond_topk_is_the_dense_answer(llm, p3, ids, tmp_path):
    """That of the same weights with an index_topk that selects everything."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(p3.path / name, tmp_path)
    config = {**p3.config, "index_topk": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dense = dj.LLM(tmp_path, dtype="float32", page_size=16).score(ids)
    policy = dj.PrefillPolicy(allow_dense_beyond_topk=True)
    np.testing.assert_allclose(llm.score(ids, prefill_policy=policy), dense, atol=2e-4, rtol=0)
    assert np.abs(llm.score(ids) - dense).max() > 0.1, "the model itself attends to fewer"
    report = llm.explain(ids, prefill_policy=policy)
    assert report.prefill_path is MHA
    token = np.arange(len(ids))
    for layer, chosen in report.topk_indices.items():
        assert chosen.shape == (len(ids), len(ids))
        np.testing.assert_array_equal(chosen, np.where(token <= token[:, None], token, -1))
        np.testing.assert_array_equal(report.owned_counts[layer].sum(axis=0), token + 1)


def equations(jaxpr) -> Iterator:
    """Every equation of a jaxpr, those of inner ones included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


@pytest.mark.parametrize("W", [1, 4])
def test_short_prompts_never_pay_for_the_indexer(tmp_path, W):
    """No score and no selection in the program of a default short step, with a prefix or without.

    The layers are dense, so that no router selects anything.
    """
    config = tiny_config(index_topk=64, mlp_layer_types=["dense"] * 3)
    directory = write_random_checkpoint(tmp_path, config)
    runner = open_runner(directory, tp=W, dcp_size=W, tokens=256)
    group = parallelism(runner.model)
    for start, tokens, dense in ((0, 64, True), (30, 34, True), (0, 65, False)):
        how = prefill_options(dj.PrefillPolicy(), group, [start], [tokens])
        assert (how["path"] is MHA) == dense
        traced = runner.trace([Row([1] * tokens, start, range(64))], **how)
        found = list(equations(traced.jaxpr))
        names = {eqn.primitive.name for eqn in found}
        scored = any("index_scores" in str(eqn.source_info.name_stack) for eqn in found)
        assert (scored, bool(names & {"top_k", "sort"})) == (not dense, not dense)
        kinds = {c.kind for c in collectives(traced.jaxpr, dict(runner.model.mesh.shape))}
        assert bool(kinds & {"index_k", "candidates", "topk"}) == (not dense and W > 1)
        assert ("latent" in kinds) == (W > 1 and (not dense or start > 0))
