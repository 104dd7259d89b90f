"""Memory of a prefill over 32k tokens: as planned, and nothing grows with tokens times keys."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.paths import parallelism, prefill_options
from dcp_jax.engine.runner import Row, Runner
from dcp_jax.plan import Layout, StepShape, workspace
from dcp_jax.plan.workspace import BUDGET
from dcp_jax.policy import PrefillPath, PrefillPolicy
from dcp_jax.testing.harness import open_runner

MHA, GATHERED = PrefillPath.MHA_ONE_SHOT, PrefillPath.GATHERED
SPLIT, OWNED = PrefillPath.GATHERED_SPLIT_INDEXER, PrefillPath.OWNED

CONTEXT, PAGE_SIZE, CHUNK = 32_768, 16, 4096
# Large enough that [T, S] floats (T = 4096, W = 4: 134 MB) would stand out beside a block's budget.
CONFIG = {
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 64,
    "index_n_heads": 2,
    "max_position_embeddings": CONTEXT,
}


def open_long(checkpoint: Callable[..., Path], **options: Any) -> Runner:
    return open_runner(checkpoint(**CONFIG), tokens=CONTEXT, page_size=PAGE_SIZE, **options)


def planned(runner: Runner, shape: StepShape) -> int:
    spec, tp = runner.spec, runner.model.mesh.size
    layout = Layout(
        tp=tp,
        dcp_size=spec.dcp_size,
        page_size=spec.page_size,
        weights="float32",
        kv_dtype=spec.kv_dtype,
        index_replicated=spec.index_replicated,
    )
    return workspace(runner.model.cfg, layout, shape).peak


# W, path, KV dtype, index cache, tokens, keys of the page table
CASES = [
    (1, MHA, "float32", "sharded", 2048, 2048),
    (4, MHA, "fp8_e4m3", "sharded", 2048, 2048),
    (1, OWNED, "float32", "sharded", 4096, CONTEXT),
    (2, OWNED, "fp8_e4m3", "replicated", 4096, CONTEXT),
    (4, OWNED, "float32", "sharded", 4096, CONTEXT),
    (2, GATHERED, "float32", "sharded", 4096, CONTEXT),
    (4, GATHERED, "fp8_e4m3", "sharded", 4096, CONTEXT),
    (4, GATHERED, "float32", "replicated", 4096, CONTEXT),
    (2, SPLIT, "fp8_e4m3", "replicated", 4096, CONTEXT),
    (4, SPLIT, "float32", "sharded", 4096, CONTEXT),
]


@pytest.mark.parametrize(
    ("W", "path", "kv_dtype", "index_cache", "tokens", "keys"),
    [pytest.param(*c, id=f"W{c[0]}-{c[1].value}-{c[2]}-{c[3]}") for c in CASES],
)
def test_steps_take_what_is_planned(checkpoint, W, path, kv_dtype, index_cache, tokens, keys):
    runner = open_long(checkpoint, tp=W, dcp_size=W, kv_dtype=kv_dtype, index_cache=index_cache)
    pages = keys // (PAGE_SIZE * W)
    row = Row([1] * tokens, keys - tokens, list(range(pages)))
    compiled = runner.trace([row], path=path, gather_chunk_tokens=CHUNK).lower().compile()
    shape = StepShape(1, tokens, pages, path, gather_chunk_tokens=CHUNK)
    measured = compiled.memory_analysis().temp_size_in_bytes
    # Ops in blocks are planned with their whole budget, two of them in the selection.
    assert measured <= planned(runner, shape) < 2 * measured + 3 * BUDGET
    if path is not MHA:
        check_largest_array(compiled.as_text(), runner, tokens, keys // W)


def check_largest_array(text: str, runner: Runner, tokens: int, local_keys: int) -> None:
    """No array of the program has an element per token and key, nor exceeds a block's budget.

    Pools may be larger: their rows are recognised by their number.
    """
    spec = runner.spec
    pools = {spec.layers * spec.rows, spec.index_layers * spec.index_rows}
    shapes = {
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"\b(?:f32|bf16|f16|u32|s32)\[([\d,]+)\]", text)
    }
    assert shapes
    large = {s for s in shapes if s[0] not in pools and 4 * np.prod(s, dtype=np.int64) > BUDGET}
    assert not large, f"arrays of more than {BUDGET} bytes: {large}"
    assert 4 * tokens * local_keys > BUDGET, "whole scores would be larger than what was checked"


@pytest.mark.slow
def test_a_prompt_of_32k_tokens_stays_within_the_plan(checkpoint):
    """Read in chunks by the default thresholds at W = 2: every path, every program it took."""
    runner = open_long(checkpoint, tp=2, dcp_size=2)
    policy, group = PrefillPolicy(gather_chunk_tokens=CHUNK), parallelism(runner.model)
    prompt = np.random.default_rng(0).integers(2, 64, CONTEXT).tolist()
    ends = [64, 512, 1024, 2048, *range(4096, CONTEXT, 4096), CONTEXT - 1, CONTEXT]
    taken = {}
    for start, end in itertools.pairwise([0, *ends]):
        how = prefill_options(policy, group, [start], [end - start])
        how["gather_chunk_tokens"] = policy.gather_chunk_tokens
        row = Row(prompt[start:end], start, list(range(pages_needed(end, PAGE_SIZE, 2))))
        runner.step([row], **how)
        taken[how["path"]] = row, how  # the longest of each is the last
    assert set(taken) == set(PrefillPath)
    for path, (row, how) in taken.items():
        traced = runner.trace([row], **how)
        batch = traced.in_avals[0][2].batch
        width = batch.page_table.shape[1]
        shape = StepShape(*batch.tokens.shape, width, path, gather_chunk_tokens=CHUNK)
        measured = traced.lower().compile().memory_analysis().temp_size_in_bytes
        assert measured <= planned(runner, shape), path
    latent = np.asarray(runner.cache.latent)
    assert np.abs(latent).max(axis=-1).min() > 0, "a row of some rank and layer was never written"
