"""`LLM`: what a user sees of generate, score, explain and capacity, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

import dcp_jax as dj
from dcp_jax.cache.pool import init_cache
from dcp_jax.engine.serving_loop import serve
from dcp_jax.mesh import make_mesh
from dcp_jax.weights.orbax import save_orbax

PROMPTS = [[7], [1, 2, 3], list(range(5, 30)), [200, 100, 50, 25, 12, 6, 3]]


@pytest.fixture(scope="module")
def p3(golden):
    return golden("p3")


@pytest.fixture(scope="module")
def llm(p3):
    """Four ranks, small pages, prompts of more than 32 tokens in chunks."""
    return dj.LLM(p3.path, tp=4, dcp_size=4, dtype="float32", page_size=4, chunked_prefill_size=32)


@pytest.fixture(scope="module")
def alone(p3):
    return dj.LLM(p3.path, dtype="float32", page_size=16)


def check_pages(llm):
    """Nothing runs, and every page is free or in the prefix cache."""
    assert not llm.engine.busy
    assert llm.engine.scheduler.pool.available == llm.capacity.pages
    llm.engine.scheduler.check()


def greedy(llm, prompts, **params):
    outs = llm.generate(prompts, dj.SamplingParams(temperature=0.0, **params), use_tqdm=False)
    return [out.outputs[0].token_ids for out in outs]


def test_golden_tokens_with_a_chunked_prompt_of_two_paths(llm, p3):
    prompt, expected = (p3.arrays[k].tolist() for k in ("greedy_prompt", "greedy_tokens"))
    assert greedy(llm, prompt, max_tokens=32, ignore_eos=True) == [expected]
    check_pages(llm)


def test_a_ragged_batch_equals_each_prompt_alone_and_one_rank(llm, alone):
    together = greedy(llm, PROMPTS, max_tokens=6, ignore_eos=True)
    assert together == [greedy(llm, [p], max_tokens=6, ignore_eos=True)[0] for p in PROMPTS]
    assert together == greedy(alone, PROMPTS, max_tokens=6, ignore_eos=True)


def test_forms_of_a_prompt(llm):
    (expected,) = greedy(llm, [[1, 2, 3]], max_tokens=2)
    for prompt in ([1, 2, 3], (1, 2, 3), {"prompt_token_ids": [1, 2, 3]}, np.array([1, 2, 3])):
        assert greedy(llm, prompt, max_tokens=2) == [expected]
    (out,) = llm.generate([1, 2, 3], dj.SamplingParams(ignore_eos=True), use_tqdm=False)
    assert (out.prompt, out.prompt_token_ids, out.finished) == (None, [1, 2, 3], True)
    assert len(out.outputs[0].token_ids) == 16
    assert out.outputs[0].finish_reason == "length"


def test_requests_wait_for_pages_and_give_them_back(p3, llm):
    """A pool of three pages runs four prompts of two pages each, one or two at a time."""
    small = dj.LLM(
        p3.path,
        tp=4,
        dcp_size=4,
        dtype="float32",
        page_size=4,
        max_total_tokens=48,
        max_model_len=48,
    )
    prompts = [list(range(i, i + 20)) for i in range(4)]
    got = greedy(small, prompts, max_tokens=4, ignore_eos=True)
    assert got == greedy(llm, prompts, max_tokens=4, ignore_eos=True)
    assert small.capacity.tokens == 48
    check_pages(small)


def test_eos_and_the_end_of_the_context(llm, monkeypatch):
    (free,) = greedy(llm, [[1, 2, 3]], max_tokens=8, ignore_eos=True)
    monkeypatch.setattr(llm, "eos_token_ids", (free[3],))
    greedy_params = dj.SamplingParams(temperature=0.0, max_tokens=8)
    (out,) = llm.generate([1, 2, 3], greedy_params, use_tqdm=False)
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", None)
    assert out.outputs[0].token_ids == free[: free.index(free[3]) + 1]
    monkeypatch.undo()
    room = llm.max_model_len - 509
    params = dj.SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)
    (out,) = llm.generate([[5] * 509], params, use_tqdm=False)
    assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (room, "length")


def test_an_interrupted_call_gives_its_pages_back(llm, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.executor, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy(llm, PROMPTS, max_tokens=2)
    check_pages(llm)


def test_progress_adds_up(llm):
    params = dj.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [[250 - token for token in prompt] for prompt in PROMPTS]
    reports = list(serve(llm.engine, [r for p in prompts for r in llm.requests(p, params)]))
    assert sum(report.prefilled for report in reports) == sum(map(len, prompts))
    assert sum(report.generated for report in reports) == 3 * len(prompts)
    assert sum(len(report.finished) for report in reports) == len(prompts)


def test_score_gives_the_reference_logits_and_their_logprobs(llm, p3):
    ids, want = p3.arrays["input_ids"][0].tolist(), p3.arrays["logits"][0]
    np.testing.assert_allclose(llm.score(ids), want, atol=2e-4, rtol=0)
    some = [100, 3, 64, 3, 127]
    np.testing.assert_allclose(llm.score(ids, some), want[some], atol=2e-4, rtol=0)
    # A small limit only makes the chunks smaller.
    report = llm.score(ids, output="logprobs", top_logprobs=2, max_bytes=200 * 257 * 4)
    logprobs = want - np.log(np.exp(want.astype(np.float64)).sum(-1, keepdims=True))
    own = logprobs[np.arange(127), ids[1:]]
    np.testing.assert_allclose(report.token_logprobs, own, atol=4e-4, rtol=0)
    np.testing.assert_array_equal(report.positions, np.arange(127))
    np.testing.assert_array_equal(report.top_token_ids[:, 0], want[:-1].argmax(-1))
    assert (np.diff(report.top_logprobs, axis=1) <= 0).all()


def test_explain_equals_the_reference_and_counts_every_rank(llm, p3):
    ids = p3.arrays["input_ids"][0].tolist()
    report = llm.explain(ids)
    assert list(report.topk_indices) == [0, 1, 3]
    for number, layer in enumerate(report.topk_indices):
        expected = p3.arrays["topk_indices"][number, 0]
        np.testing.assert_array_equal(report.topk_indices[layer], expected)
        ranks = [np.sum((expected >= 0) & (expected % 4 == rank), axis=-1) for rank in range(4)]
        np.testing.assert_array_equal(report.owned_counts[layer], ranks)
    for number, layer in enumerate(p3.arrays["moe_layers"].tolist()):
        np.testing.assert_array_equal(report.expert_ids[layer], p3.arrays["expert_ids"][number, 0])
    assert len(report.prefill_paths) == 4
    assert report.bytes_exchanged["tp_sum"] > 0
    assert list(llm.explain(ids[:5], layers=[3]).topk_indices) == [3]


@pytest.mark.slow
def test_paths_and_exchanges_of_a_forced_policy(p3):
    """Each path reports its own exchanges, all select the same, and the dense one stops at K."""
    ids, reports = p3.arrays["input_ids"][0, :40].tolist(), {}
    dense = dj.PrefillPath.MHA_ONE_SHOT
    for path in dj.PrefillPath:
        ranks = dj.LLM(
            p3.path,
            tp=2,
            dcp_size=2,
            dtype="float32",
            page_size=4,
            prefill_policy=dj.PrefillPolicy(force=path),
        )
        if path is dense:
            with pytest.raises(
                ValueError, match="mha_one_shot.*40 keys are more than index_topk=16"
            ):
                ranks.explain(ids)
        reports[path] = ranks.explain(ids[:16] if path is dense else ids)
        assert reports[path].prefill_path is path
    exchanged = {
        path.value: set(r.bytes_exchanged) - {"argmax", "tp_sum"} for path, r in reports.items()
    }
    assert exchanged == {
        "mha_one_shot": set(),
        "gathered": {"index_k", "latent"},
        "gathered_split_indexer": {"index_k", "latent", "topk"},
        "owned": {"candidates", "merge", "q"},
    }
    for layer, chosen in reports[dj.PrefillPath.OWNED].topk_indices.items():
        for path, report in reports.items():
            rows = len(report.topk_indices[layer])
            np.testing.assert_array_equal(report.topk_indices[layer], chosen[:rows], str(path))


def test_capacity_is_that_of_the_arrays(llm):
    capacity, cache = llm.capacity, llm.engine.runner.cache
    assert capacity.tokens == capacity.pages * capacity.page_tokens
    leaves = {"latent": (cache.latent, cache.k_pe), "index_k": (cache.index_k,)}
    for name, arrays in leaves.items():
        local = sum(array.addressable_shards[0].data.nbytes for array in arrays)
        assert capacity.rank_bytes[name] == local
        assert capacity.bytes_per_token[name] == local / capacity.tokens


@pytest.mark.slow
def test_arrays_in_memory_and_orbax_directories(llm, p3, tmp_path):
    expected = greedy(llm, PROMPTS[:2], max_tokens=1)
    runner = llm.engine.runner
    same = dj.LLM(
        llm.config, params=runner.params, mesh=llm.model.mesh, dtype="float32", page_size=4
    )
    assert greedy(same, PROMPTS[:2], max_tokens=1) == expected
    save_orbax(tmp_path / "saved", runner.params, p3.path)
    restored = dj.LLM(tmp_path / "saved", tp=2, dcp_size=2, dtype="float32", page_size=4)
    assert greedy(restored, PROMPTS[:2], max_tokens=1) == expected


@pytest.mark.slow
def test_a_bf16_checkpoint_runs_as_it_is(golden):
    """dtype="auto" computes in bfloat16; a short greedy text is the same for every W."""
    path = golden("p4").path
    texts = [
        greedy(dj.LLM(path, tp=w, dcp_size=w, page_size=4), [PROMPTS[3]], max_tokens=4)
        for w in (1, 3)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_fp8_cache_generates(p3):
    ranks = dj.LLM(p3.path, tp=2, dcp_size=2, kv_cache_dtype="fp8", page_size=4)
    assert ranks.engine.runner.cache.latent.dtype == np.uint8
    (tokens,) = greedy(ranks, [PROMPTS[2]], max_tokens=3, ignore_eos=True)
    assert len(tokens) == 3


def test_padding_is_reported(p3):
    three = dj.LLM(p3.path, tp=3, dcp_size=3, dtype="float32", page_size=4)
    assert three.padding["heads"] == (4, 6)
    assert three.padding["vocab"] == (257, 258)
    assert dj.LLM(p3.path, page_size=4).padding == {}


@dataclasses.dataclass(frozen=True)
class Refusal:
    id: str
    options: dict
    says: str


REFUSALS = [
    Refusal("dcp-not-dividing-tp", {"tp": 4, "dcp_size": 3}, r"dcp_size=3 does not divide tp=4"),
    Refusal("tp-zero", {"tp": 0}, "tp=0 is not a count"),
    Refusal("too-few-devices", {"tp": 64}, "tp=64 needs 64 devices and 8 are visible"),
    Refusal("kv-dtype", {"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not supported"),
    Refusal("dtype", {"dtype": "float16"}, "dtype='float16' is not supported"),
    Refusal("comm-alone", {"dcp_comm": "a2a"}, "dcp_comm='a2a' has no effect with dcp_size=1"),
    Refusal("index-alone", {"index_cache": "replicated"}, "no effect with dcp_size=1"),
    Refusal("kernels", {"kernels": "cuda"}, "kernels='cuda' is not supported"),
    Refusal("page", {"page_size": 0}, "page_size=0 is not a count"),
    Refusal("fraction", {"mem_fraction_static": 1.5}, "mem_fraction_static=1.5"),
    Refusal("fraction-text", {"mem_fraction_static": "0.9"}, "mem_fraction_static='0.9'"),
    Refusal("kv-list", {"kv_cache_dtype": ["fp8"]}, r"kv_cache_dtype=\['fp8'\]"),
    Refusal("policy", {"prefill_policy": "gathered"}, "prefill_policy='gathered'"),
    Refusal(
        "gathered-alone",
        {"prefill_policy": dj.PrefillPolicy(force=dj.PrefillPath.GATHERED)},
        "prefill.force='gathered' has no effect with dcp_size=1",
    ),
    Refusal("speculative", {"speculative_algorithm": "EAGLE"}, "speculative_algorithm='EAGLE'"),
    Refusal("lora", {"enable_lora": True}, "enable_lora=True"),
    Refusal("context", {"max_model_len": 513}, "max_position_embeddings=512"),
    Refusal(
        "pool-too-small",
        {"max_total_tokens": 100, "max_model_len": 200, "page_size": 16},
        "max_model_len=200 does not fit a pool of 112 tokens",
    ),
    Refusal("all-at-once", {"page_size": 0, "tp": -1}, "2 options cannot be used"),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in REFUSALS])
def test_options_are_refused_before_weights_load(case, p3, monkeypatch):
    monkeypatch.setattr(
        "dcp_jax.llm.load_params", lambda *_, **__: pytest.fail("weights were read")
    )
    with pytest.raises(ValueError, match=case.says):
        dj.LLM(p3.path, **case.options)


def test_unknown_options_raise(p3):
    with pytest.raises(TypeError, match="tensor_parallel"):
        dj.LLM(p3.path, tensor_parallel=2)
    with pytest.raises(TypeError, match="best_of"):
        dj.SamplingParams(best_of=2)


BAD_PROMPTS = [
    ("text", "no tokenizer.json"),
    ([], "prompt"),
    ([[]], "prompt 0 is empty"),
    ([[1], [257]], "prompt 1 has token ids outside the vocabulary: \\[257\\]"),
    ([[1, -1]], "outside the vocabulary: \\[-1\\]"),
    (5, "prompts=5 is no prompt"),
    ([None], "prompt 0 is None"),
    ({"prompt_token_ids": None}, "prompt 0 is None"),
    ([[1.5]], "outside the vocabulary: \\[1.5\\]"),
    ([[True]], "outside the vocabulary: \\[True\\]"),
    ({"prompt_token_ids": [1], "seed": 1}, "has the keys"),
    ([[5] * 512], "prompt 0 has 512 tokens and 1 to generate, but max_model_len is 512"),
]


@pytest.mark.parametrize(("prompt", "says"), BAD_PROMPTS)
def test_bad_prompts_are_refused_before_anything_runs(prompt, says, alone, monkeypatch):
    monkeypatch.setattr(alone.engine, "step", lambda: pytest.fail("something ran"))
    if prompt == []:
        assert_nothing_to_do(alone, monkeypatch)
        return
    with pytest.raises(ValueError, match=says):
        alone.generate(prompt, use_tqdm=False)


def assert_nothing_to_do(llm, monkeypatch):
    monkeypatch.undo()
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"positions": [0.7]}, "not a list of whole numbers"),
        ({"positions": [[0]]}, "not a list of whole numbers"),
        ({"output": "logprobs", "top_logprobs": 64, "max_bytes": 10}, "lower top_logprobs"),
        ({"positions": [3]}, r"positions must lie in 0..2 for logits"),
        ({"positions": [-1]}, r"got -1"),
        ({"positions": [2], "output": "logprobs"}, r"0..1 for logprobs"),
        ({"output": "probs"}, "output='probs' is unknown"),
        ({"top_logprobs": 2}, "goes with"),
        ({"top_logprobs": 300, "output": "logprobs"}, "at most the vocabulary, 257"),
        ({"max_bytes": 1000}, r"take 3,084 bytes, more than max_bytes=1,000"),
    ],
)
def test_score_refuses(arguments, says, alone):
    with pytest.raises(ValueError, match=says):
        alone.score([1, 2, 3], **arguments)


def test_explain_refuses_shared_layers(alone):
    with pytest.raises(ValueError, match=r"layers \[2\] have no indexer of their own"):
        alone.explain([1, 2, 3], layers=[0, 2])


def test_caches_live_where_the_mesh_says(llm):
    mesh = make_mesh(4, 4)
    fresh = init_cache(llm.engine.runner.spec, mesh)
    used = llm.engine.runner.cache
    for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(used), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_a_step_that_is_interrupted_after_its_caches_were_given_away(alone, monkeypatch):
    """The donated caches are gone, so the engine starts empty ones and stays usable."""
    expected = greedy(alone, [PROMPTS[1]], max_tokens=2)
    programs = alone.engine.executor.programs.compiled

    def interrupted(program):
        def run(*args):
            program(*args)
            raise KeyboardInterrupt

        return run

    for bucket, program in programs.items():
        monkeypatch.setitem(programs, bucket, interrupted(program))
    with pytest.raises(KeyboardInterrupt):
        greedy(alone, [PROMPTS[1]], max_tokens=2)
    monkeypatch.undo()
    assert greedy(alone, [PROMPTS[1]], max_tokens=2) == expected
    check_pages(alone)


def test_params_of_another_mesh_or_dtype_are_refused(alone):
    params = alone.engine.runner.params
    with pytest.raises(ValueError, match=r"embed is float32\[257, 48\], not float32\[258, 48\]"):
        dj.LLM(alone.config, params=params, tp=2, dcp_size=2, dtype="float32")
    with pytest.raises(ValueError, match="not bfloat16"):
        dj.LLM(alone.config, params=params, dtype="bfloat16")
