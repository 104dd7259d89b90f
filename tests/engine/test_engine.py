"""The engine under load: every request gets what it gets alone, and nothing is left behind."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

import dcp_jax as dj
from dcp_jax.bench.soak import soak
from dcp_jax.engine.errors import StepError
from dcp_jax.engine.ladder import Ladder
from dcp_jax.engine.paths import possible_paths
from dcp_jax.engine.scheduler import QueueFull
from dcp_jax.engine.serving_loop import serve
from dcp_jax.policy import Parallelism

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


def ladder(dcp_size: int, *, rows: int, chunk: tuple[int, int], pages: int, **changes) -> Ladder:
    """One size of everything: few programs."""
    group = Parallelism(dcp_size, gathered_heads=8, index_topk=16)
    paths = possible_paths(dj.PrefillPolicy(), group)
    return Ladder((rows,), (chunk,), (pages,), paths, **{"samplers": ("greedy", "full")} | changes)


@pytest.fixture(scope="module")
def path(golden) -> Path:
    return golden("p3").path


@pytest.fixture(scope="module")
def alone(path):
    """One request at a time, on one rank, prompts whole, no page shared."""
    sizes = ladder(1, rows=1, chunk=(1, 128), pages=8)
    llm = dj.LLM(
        path,
        dtype="float32",
        page_size=16,
        max_model_len=128,
        max_running_requests=1,
        enable_prefix_caching=False,
        ladder=sizes,
    )

    def tokens(prompt, params) -> list[int]:
        (out,) = llm.generate(prompt, params, use_tqdm=False)
        return out.outputs[0].token_ids

    return tokens


@dataclass(frozen=True)
class Served:
    """A layout on which requests are served together."""

    dcp_size: int
    page_size: int
    decode_steps: int = 1

    @property
    def page_tokens(self) -> int:
        return self.dcp_size * self.page_size


SERVED = [
    pytest.param(Served(4, 2), id="W4"),
    pytest.param(Served(2, 4, decode_steps=3), id="W2-steps3"),
    *(
        pytest.param(case, id=f"W{case.dcp_size}", marks=pytest.mark.slow)
        for case in (Served(1, 8), Served(2, 4), Served(3, 3), Served(8, 1, decode_steps=2))
    ),
]


def mixed_requests(count: int, page: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate): one token to several pages, some with a common beginning."""
    rng = np.random.default_rng(seed)
    common = [rng.integers(2, 256, size).tolist() for size in (0, page, 3 * page + 2, 5 * page)]
    made = []
    for i in range(count):
        begins, new = common[i % 4], int(rng.integers(1, 4 * page))
        prompt = begins + rng.integers(2, 256, 1 if i < 4 else new).tolist()
        made.append((prompt[:100], int(rng.integers(1, 25))))
    return made


def greedy(tokens: int) -> dj.SamplingParams:
    return dj.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def finish(engine) -> None:
    while engine.busy:
        engine.step()
    engine.scheduler.check()


@pytest.mark.parametrize("case", SERVED)
def test_64_requests_together_equal_each_alone(case, path, alone):
    """Shared prefixes, chunks, a pool of a quarter of the working set, arrivals and aborts."""
    page, rows = case.page_tokens, 16
    wanted = mixed_requests(64, page)
    final = [-(-(len(prompt) + tokens) // page) for prompt, tokens in wanted]
    working_set = sum(sorted(final)[-rows:])
    pages = max(working_set // 4, max(final))
    llm = dj.LLM(
        path,
        tp=case.dcp_size,
        dcp_size=case.dcp_size,
        dtype="float32",
        page_size=case.page_size,
        decode_steps=case.decode_steps,
        chunked_prefill_size=24,
        max_running_requests=rows,
        max_total_tokens=pages * page,
        max_model_len=min(128, pages * page),
        ladder=ladder(case.dcp_size, rows=rows, chunk=(4, 24), pages=-(-128 // page)),
    )
    engine, rng = llm.engine, np.random.default_rng(1)
    requests = [llm.requests(prompt, greedy(tokens))[0] for prompt, tokens in wanted]
    arriving, aborted, together, mixed = list(requests), 0, 0, 0
    while arriving or engine.busy:
        for request in arriving[:2]:
            engine.submit(request)
        arriving = arriving[2:]
        report = engine.step()
        engine.scheduler.check()
        together = max(together, len(engine.scheduler.running))
        mixed += len({name.split("-")[0] for name, *_ in report.launched}) > 1
        if aborted < 8 and engine.scheduler.has_work and rng.random() < 0.1:
            victims = [*engine.scheduler.running, *engine.scheduler.waiting]
            engine.abort(victims[rng.integers(len(victims))])
            aborted += 1
    assert together > 4
    assert mixed > 10
    assert engine.scheduler.preemptions > 3
    assert engine.failures == 0
    ended = {"length": 0, "abort": 0}
    for request, (prompt, tokens) in zip(requests, wanted, strict=True):
        want = alone(prompt, greedy(tokens))
        got = request.output_token_ids
        assert got == want[: len(got)]
        assert request.finish_reason == "abort" or len(got) == tokens
        ended[request.finish_reason] += 1
    assert ended["abort"] == aborted > 3
    assert engine.scheduler.pool.available == pages


@pytest.mark.slow
def test_in_bf16_requests_differ_at_near_ties_only(golden, record_property):
    """Batches of other sizes round otherwise; where a token differs, both were as good."""
    llm = dj.LLM(
        golden("p4").path,
        tp=2,
        dcp_size=2,
        page_size=4,
        chunked_prefill_size=24,
        max_running_requests=16,
        max_model_len=128,
        ladder=ladder(2, rows=16, chunk=(4, 24), pages=16),
    )
    wanted = mixed_requests(32, 8, seed=4)
    apart = []
    for prompt, tokens in wanted:
        llm.engine.scheduler.pool.clear()
        (out,) = llm.generate(prompt, greedy(tokens), use_tqdm=False)
        apart.append(out.outputs[0].token_ids)
    requests = [llm.requests(prompt, greedy(tokens))[0] for prompt, tokens in wanted]
    list(serve(llm.engine, requests))
    differing = 0
    for request, want in zip(requests, apart, strict=True):
        got = request.output_token_ids
        if got == want:
            continue
        differing += 1
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        logits = llm.score(request.prompt_token_ids + got[:at], use_tqdm=False)[-1]
        gap = abs(float(logits[got[at]] - logits[want[at]]))
        assert gap <= 2**-5 * np.abs(logits).max(), "no near-tie"
    record_property("differing in bf16", f"{differing} of {len(requests)}")
    print(f"{differing} of {len(requests)} requests differ in bf16, at near-ties")


# -- one warm engine for the rest --------------------------------------------------------------

PAGE, WARM_PAGES = 8, 32


@pytest.fixture(scope="module")
def warm(path):
    """Two ranks, everything compiled; so few candidates that most steps run again in full width."""
    llm = dj.LLM(
        path,
        tp=2,
        dcp_size=2,
        dtype="float32",
        page_size=PAGE // 2,
        chunked_prefill_size=32,
        decode_steps=2,
        max_running_requests=4,
        max_queued_requests=40,
        max_model_len=128,
        max_total_tokens=WARM_PAGES * PAGE,
        ladder=ladder(2, rows=4, chunk=(2, 32), pages=128 // PAGE, dense_pages=(16 // PAGE,)),
    )
    llm.engine.runner.opts = replace(llm.engine.runner.opts, candidates=2)
    llm.warm_up(use_tqdm=False)
    llm.engine.executor.wait_compiled()
    yield llm
    llm.close()


@pytest.fixture
def compiled():
    """How many programs the backend compiled since the test began."""
    count = []

    def listen(event: str, _: float, **__) -> None:
        if event == BACKEND_COMPILE:
            count.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


KINDS = [
    dj.SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    dj.SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, seed=3, ignore_eos=True),
    dj.SamplingParams(
        temperature=0.7,
        max_tokens=14,
        seed=4,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        ignore_eos=True,
    ),
    dj.SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, logit_bias={7: 2.0}),
    dj.SamplingParams(temperature=1.0, max_tokens=6, seed=5, min_tokens=4, stop_token_ids=[9]),
]


def mixed_kinds(llm, count: int = 20, seed: int = 2):
    """Requests of every kind of sampling, over prompts of a few pages."""
    prompts = [prompt for prompt, _ in mixed_requests(count, PAGE, seed)]
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    return [llm.requests(p, kind)[0] for p, kind in zip(prompts, kinds, strict=True)]


def test_uncertified_steps_run_again_and_nothing_compiles_or_leaks(warm, alone, compiled):
    """Whatever was on its way is launched again, penalties included; all programs are there."""
    assert not warm.engine.executor.programs.compiling
    requests = mixed_kinds(warm)
    reruns, arrays = warm.engine.runner.reruns, None
    for half in (requests[:10], requests[10:]):
        list(serve(warm.engine, half))
        finish(warm.engine)
        found = len(jax.live_arrays())
        assert arrays is None or found <= arrays, "arrays are left behind"
        arrays = found
    assert compiled == []
    assert warm.engine.runner.reruns > reruns + 20
    for request in requests:
        assert request.output_token_ids == alone(request.prompt_token_ids, request.params)
    assert all(len(r.logprobs) == len(r.output_token_ids) for r in requests if r.params.logprobs)


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 5 * PAGE - 1, 5 * PAGE + 2])
def test_a_warm_prefix_is_whole_pages_and_gives_the_same(warm, length):
    prompt = np.random.default_rng(length).integers(2, 256, length).tolist()
    first, second = (warm.generate(prompt, greedy(6), use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // PAGE * PAGE
    assert first.outputs == second.outputs


def test_filling_the_pool_past_one_ranks_rows(warm):
    """Slots beyond a rank's rows: the last pages of the pool hold what was written there."""
    rows = warm.engine.runner.spec.rows
    prompts = [prompt for prompt, _ in mixed_requests(8, 12, seed=9) if len(prompt) > 40][:4]
    seen = set()
    requests = [warm.requests(prompt, greedy(20))[0] for prompt in prompts]
    for _ in serve(warm.engine, requests):
        seen |= {page for r in requests for page in r.pages}
    assert max(seen) * PAGE >= rows
    for request in requests:
        (out,) = warm.generate(request.prompt_token_ids, greedy(20), use_tqdm=False)
        assert out.outputs[0].token_ids == request.output_token_ids


def test_abort_at_any_moment(warm, alone):
    """After each number of steps: what was generated is right, the pages are back."""
    prompt = list(range(30, 75))
    want = alone(prompt, greedy(12))
    for steps in range(0, 14, 2):
        (request,) = warm.requests(prompt, greedy(12))
        warm.engine.submit(request)
        for _ in range(steps):
            warm.engine.step()
        warm.engine.abort(request)
        finish(warm.engine)
        assert request.finish_reason == "abort" or steps > 7
        assert request.output_token_ids == want[: len(request.output_token_ids)]
        assert warm.engine.scheduler.pool.available == WARM_PAGES
    warm.engine.abort(request)  # twice does nothing
    with pytest.raises(ValueError, match=r"ended .* cannot run again"):
        warm.engine.submit(request)


def failing(llm, monkeypatch, error: Exception, *, after: int, lose_caches: bool) -> None:
    """Make the next decode launch after `after` others fail, once."""
    executor, calls = llm.engine.executor, []
    launch = executor.decode

    def decode(rows, sampler):
        calls.append(rows)
        if len(calls) == after + 1:
            if lose_caches:
                jax.tree.map(lambda leaf: leaf.delete(), llm.engine.runner.cache)
            raise error
        return launch(rows, sampler)

    monkeypatch.setattr(executor, "decode", decode)


@pytest.mark.parametrize("lose_caches", [False, True])
def test_a_launch_that_fails_ends_its_requests_only(warm, alone, monkeypatch, lose_caches):
    """Decoding requests end with the error; one that still reads its prompt goes on."""
    out_of_memory = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    failing(warm, monkeypatch, out_of_memory, after=2, lose_caches=lose_caches)
    short = [warm.requests([5, 6, i], greedy(9))[0] for i in range(2)]
    (long,) = warm.requests(list(range(2 + lose_caches, 112)), greedy(4))
    list(serve(warm.engine, [*short, long]))
    for request in short:
        assert request.finish_reason == "error"
        assert isinstance(request.error, StepError)
        for option in ("mem_fraction_static", "max_total_tokens", "chunked_prefill_size"):
            assert option in str(request.error)
        want = alone(request.prompt_token_ids, request.params)
        assert request.output_token_ids == want[: len(request.output_token_ids)]
    assert long.output_token_ids == alone(long.prompt_token_ids, long.params)
    finish(warm.engine)
    assert warm.engine.scheduler.pool.available == WARM_PAGES
    monkeypatch.undo()
    (out,) = warm.generate([5, 6, 0], greedy(9), use_tqdm=False)
    assert out.outputs[0].token_ids == alone([5, 6, 0], greedy(9))


def test_results_that_cannot_be_read(warm, alone, monkeypatch):
    """The error of an execution shows when its tokens are read: its successor is dropped too."""
    executor, read, calls = warm.engine.executor, warm.engine.executor.read, []

    def broken(launch):
        calls.append(launch)
        if len(calls) == 4:
            raise RuntimeError("INTERNAL: a device is gone")
        return read(launch)

    monkeypatch.setattr(executor, "read", broken)
    with pytest.raises(StepError, match="INTERNAL: a device is gone"):
        warm.generate([3, 1, 4], greedy(9), use_tqdm=False)
    finish(warm.engine)
    (out,) = warm.generate([3, 1, 4], greedy(9), use_tqdm=False)
    assert out.outputs[0].token_ids == alone([3, 1, 4], greedy(9))


def test_prompt_logprobs_beside_running_requests(warm):
    params = dj.SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    prompt = list(range(40, 60))
    (other,) = warm.requests([9, 8, 7], greedy(12))
    warm.engine.submit(other)
    warm.engine.step()
    (out,) = warm.generate(prompt, params, use_tqdm=False)
    finish(warm.engine)
    scored = warm.score(prompt, output="logprobs")
    pairs = zip(out.prompt_logprobs[1:], prompt[1:], strict=True)
    own = [entry[token].logprob for entry, token in pairs]
    np.testing.assert_allclose(own, scored.token_logprobs, atol=1e-5)
    assert len(other.output_token_ids) == 12


def test_a_full_queue_refuses_and_aborts_what_it_took(warm):
    requests = [warm.requests([i], greedy(2))[0] for i in range(41)]
    with pytest.raises(QueueFull, match="40 requests wait already"):
        next(serve(warm.engine, requests))
    assert not warm.engine.busy


def test_a_request_that_never_fits_is_refused(warm):
    (request,) = warm.requests([1] * 100, greedy(4))
    request.limit = WARM_PAGES * PAGE
    with pytest.raises(ValueError, match=r"needs 45 pages and the pool has 32: shorten it"):
        warm.engine.submit(request)


def test_a_soak_leaves_nothing_behind(warm):
    """Random arrivals, samplings and aborts; short prompts on the dense path beside long ones."""
    report = soak(warm, seconds=3, rounds=3, use_tqdm=False)
    assert report.faults == []
    assert report.preemptions > 0
    assert {"length", "abort"} <= set(report.ended) <= {"length", "abort", "stop"}
    assert report.generated > 100
