"""`AsyncLLM`: streams on asyncio equal `generate`, cancelling aborts, nothing is left behind."""

import asyncio
import contextlib
import threading

import pytest

import dcp_jax as dj
from dcp_jax.engine.errors import StepError
from dcp_jax.engine.ladder import Ladder
from dcp_jax.policy import PrefillPath

PROMPTS = [[5, 6, 7], list(range(30, 60)), [9], [200, 100, 50]]


@pytest.fixture(scope="module")
def llm(golden):
    sizes = Ladder((4,), ((4, 32),), (8,), (PrefillPath.OWNED,), ("full",))
    return dj.LLM(
        golden("p3").path,
        dtype="float32",
        page_size=16,
        max_model_len=128,
        max_running_requests=4,
        chunked_prefill_size=32,
        ladder=sizes,
    )


def params(tokens: int = 12, **changes) -> dj.SamplingParams:
    return dj.SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True, **changes)


@pytest.fixture(scope="module")
def expected(llm):
    outs = llm.generate(PROMPTS, params(n=2), use_tqdm=False)
    return [[c.token_ids for c in out.outputs] for out in outs]


def run(llm, body):
    """Run `body(service)`; afterwards no thread is left, and every page is free or cached."""

    async def main():
        async with dj.AsyncLLM(llm, warm_up=False) as service:
            return await body(service)

    result = asyncio.run(main())
    assert not [t for t in threading.enumerate() if t.name.startswith("dcp-jax")]
    while llm.engine.busy:
        llm.engine.step()
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.available == llm.capacity.pages
    return result


async def streamed(service, prompt, wanted) -> list[list[int]]:
    tokens = [[] for _ in range(wanted.n)]
    async for piece in service.stream(prompt, wanted):
        tokens[piece.index] += piece.token_ids
    return tokens


def test_streams_together_equal_generate(llm, expected):
    async def body(service):
        streams = (streamed(service, prompt, params(n=2)) for prompt in PROMPTS)
        whole = service.generate(PROMPTS[0], params(n=2))
        return await asyncio.gather(whole, *streams)

    whole, *tokens = run(llm, body)
    assert tokens == expected
    assert [c.token_ids for c in whole.outputs] == expected[0]


def test_a_cancelled_task_aborts_its_request(llm, expected):
    async def body(service):
        task = asyncio.create_task(streamed(service, PROMPTS[1], params(90)))
        left = service.stream(PROMPTS[3], params(90))
        await anext(left)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await left.aclose()
        other = await service.generate(PROMPTS[0], params(n=2))
        assert not service.llm.engine.scheduler.running, "both are gone"
        return [c.token_ids for c in other.outputs]

    assert run(llm, body) == expected[0]


def test_closing_ends_who_waits(llm):
    async def body(service):
        task = asyncio.create_task(streamed(service, PROMPTS[1], params(90)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(service.close)
        with pytest.raises(RuntimeError, match="closed while a request ran"):
            await task
        with pytest.raises(RuntimeError, match="is closed"):
            await service.generate(PROMPTS[0], params())

    run(llm, body)


def test_errors_reach_their_caller(llm, expected, monkeypatch):
    read, calls = llm.engine.executor.read, []

    def broken(launch):
        calls.append(launch)
        if len(calls) == 3:
            raise RuntimeError("INTERNAL: broken")
        return read(launch)

    async def body(service):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await service.generate([999], params())
        monkeypatch.setattr(llm.engine.executor, "read", broken)
        with pytest.raises(StepError, match="INTERNAL: broken"):
            await service.generate(PROMPTS[0], params())
        again = await service.generate(PROMPTS[0], params(n=2))
        return [c.token_ids for c in again.outputs]

    assert run(llm, body) == expected[0]
