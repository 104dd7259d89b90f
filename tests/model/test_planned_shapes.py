"""Prefill steps of many shapes, and those of an engine's limits, need no more memory than planned.

Read from compiled programs. The plan may be up to four times what XLA allocates: it takes all parts
of a stage as alive at once, and the blocks of an op as full.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.buckets import page_bucket, row_bucket, token_bucket
from dcp_jax.engine.engine import Engine
from dcp_jax.engine.runner import Row, Runner
from dcp_jax.plan import Deployment, Layout, StepShape, workspace
from dcp_jax.policy import PrefillPath, PrefillPolicy
from dcp_jax.testing.harness import open_runner

PAGE = 16
# The programs never run: machine code need not be good. Buffers are assigned before.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MHA, GATHERED, SPLIT, OWNED = (
    PrefillPath.MHA_ONE_SHOT,
    PrefillPath.GATHERED,
    PrefillPath.GATHERED_SPLIT_INDEXER,
    PrefillPath.OWNED,
)
SMALL = {
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "dense"],
    "index_topk": 64,
    "index_n_heads": 2,
    "max_position_embeddings": 65536,
}
# Wide where attention is: latents and heads as in the released models, a quarter as many.
WIDE = SMALL | {
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 64,
}


@dataclass(frozen=True)
class Case:
    """A prefill step of `rows` rows of `tokens` new tokens, with page tables of `table` tokens."""

    id: str
    path: PrefillPath
    dcp: int
    tokens: int
    table: int
    rows: int = 1
    kv_dtype: str = "float32"
    index_cache: str = "sharded"
    chunk: int = 4096
    with_prefix: bool = True
    config: str = "small"


FP8 = {"kv_dtype": "fp8_e4m3"}
REPLICATED = {"index_cache": "replicated"}
CASES = [
    Case("gathered-w4-rows", GATHERED, 4, 512, 8192, 4, chunk=8192, **FP8),
    Case("split-w4-rows", SPLIT, 4, 512, 8192, 4, chunk=2048),
    Case("owned-w4-rows", OWNED, 4, 256, 8192, 4, **FP8, **REPLICATED),
    Case("mha-w1-rows", MHA, 1, 256, 2048, 4, config="wide", **FP8),
    Case("mha-w1-no-prefix", MHA, 1, 2048, 2048, config="wide", with_prefix=False),
    Case("mha-w2", MHA, 2, 1024, 2048, config="wide", **FP8),
    Case("mha-w4", MHA, 4, 256, 1024, 4, config="wide"),
    Case("mha-w4-no-prefix", MHA, 4, 512, 512, 4, config="wide", with_prefix=False, **FP8),
    Case("owned-w1-wide", OWNED, 1, 1024, 2048, config="wide"),
    Case("owned-w4-wide", OWNED, 4, 1024, 2048, config="wide"),
    Case("gathered-w2-wide", GATHERED, 2, 1024, 4096, config="wide", chunk=1024, **FP8),
    Case("gathered-w4-one-chunk", GATHERED, 4, 1024, 2048, config="wide"),
    Case("split-w2-wide", SPLIT, 2, 512, 4096, 2, config="wide", chunk=1024),
    Case("split-w4-wide", SPLIT, 4, 1024, 4096, config="wide", **REPLICATED, **FP8),
]


@pytest.fixture(scope="module")
def compiled(checkpoint: Callable[..., Path]) -> Callable[[Case], tuple[Any, int, int]]:
    """A case's program, its planned peak, and the largest single part of the plan."""
    done: dict[Case, tuple[Any, int, int]] = {}

    def compile_case(case: Case) -> tuple[Any, int, int]:
        runner: Runner = open_runner(
            checkpoint(**(WIDE if case.config == "wide" else SMALL)),
            tp=case.dcp,
            dcp_size=case.dcp,
            tokens=case.table,
            page_size=PAGE,
            kv_dtype=case.kv_dtype,
            index_cache=case.index_cache,
            gather_chunk_tokens=case.chunk,
        )
        pages = pages_needed(case.table, PAGE, case.dcp)
        row = Row([1] * case.tokens, case.table - case.tokens, range(pages))
        how = {"path": case.path, "with_prefix": case.with_prefix}
        program = runner.trace([row] * case.rows, **how).lower().compile(compiler_options=FAST)
        shape = StepShape(
            row_bucket(case.rows),
            token_bucket(case.tokens),
            page_bucket(pages, PAGE, case.dcp, runner.spec.pages),
            gather_chunk_tokens=case.chunk,
            **how,
        )
        space = workspace(runner.model.cfg, layout_of(case), shape)
        parts = [size for stage in space.stages.values() for size in stage.values()]
        return program, space.peak, max(*parts, *space.throughout.values())

    def get(case: Case) -> tuple[Any, int, int]:
        if case not in done:
            done[case] = compile_case(case)
        return done[case]

    return get


def layout_of(case: Case) -> Layout:
    return Layout(
        tp=case.dcp,
        dcp_size=case.dcp,
        page_size=PAGE,
        weights="float32",
        kv_dtype=case.kv_dtype,  # type: ignore[arg-type]
        index_replicated=case.index_cache == "replicated",
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_temporary_memory_is_planned(compiled, case: Case):
    program, peak, _ = compiled(case)
    measured = program.memory_analysis().temp_size_in_bytes
    assert measured <= peak <= 4 * measured


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_no_float_array_is_larger_than_planned(compiled, case: Case):
    """None is larger than the largest part of the plan."""
    program, _, largest_part = compiled(case)
    assert max(float_bytes(program.as_text())) <= largest_part


ARRAY = re.compile(r"\b(f64|f32|bf16|f16)\[([0-9,]*)\]")
BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}


def float_bytes(program: str) -> Iterator[int]:
    """Bytes of every float array of a compiled program (HLO text) but its inputs.

    What a fusion computes inside is never stored, so only its result counts.
    """
    fused = set(re.findall(r"calls=%([\w.\-]+)", program))
    # A computation: its name at the start of a line, then indented instructions.
    computations = re.split(r"^(?=(?:ENTRY )?%[\w.\-]+ )", program, flags=re.MULTILINE)
    entry = next(text for text in computations if text.startswith("ENTRY"))
    inputs = {
        found
        for line in entry.splitlines()
        if " parameter(" in line
        for found in ARRAY.findall(line)
    }
    for text in computations:
        name = re.match(r"(?:ENTRY )?%([\w.\-]+) ", text)
        if name and name[1] not in fused:
            # Results stand before the operation, operands (results of others) are only named.
            for found in set(ARRAY.findall(text)) - inputs:
                sizes = [int(size) for size in found[1].split(",") if size]
                yield math.prod(sizes) * BYTES[found[0]]


def test_float_arrays_of_a_program():
    """Of a matmul in a loop and a fused sum; the [4096, 64] that is summed is never stored."""

    def step(x, y):
        doubled = jax.lax.fori_loop(0, 3, lambda i, a: a @ y + i, x)
        return (doubled[:, :, None] + y[0][:64]).sum((0, 2))

    x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 128), (128, 128)))
    program = jax.jit(step).lower(x, y).compile().as_text()
    assert "[64,128,64]" in program
    assert 64 * 128 * 64 * 4 not in float_bytes(program)


# Thresholds that lead one prompt through every path, in chunks of 256 tokens: dense up to 512
# tokens, split from a mean of 2048 keys, owned from 12 * 256 tokens of prefix (8 heads).
EVERY_PATH = PrefillPolicy(
    dense_attn_kv_len_threshold=512,
    allow_dense_beyond_topk=True,
    split_indexer_min_kv=2048,
    owned_prefill_ratio=1.5,
    gather_chunk_tokens=1024,
)


@pytest.mark.slow
@pytest.mark.parametrize("dcp", [1, 2])
def test_an_engine_stays_within_the_plan_of_its_limits(checkpoint: Callable[..., Path], dcp: int):
    """A prompt read by an engine: the programs that ran, against the steps its limits allow."""
    tokens, chunk = 4096, 256
    runner = open_runner(
        checkpoint(**SMALL),
        tp=dcp,
        dcp_size=dcp,
        tokens=tokens,
        page_size=PAGE,
        largest_step=chunk,
        gather_chunk_tokens=EVERY_PATH.gather_chunk_tokens,
    )
    engine = Engine(runner, policy=EVERY_PATH, max_running_requests=1, chunked_prefill_size=chunk)
    prompt = [i * 7 % 64 for i in range(tokens)]
    paths = {part.path for part in engine.prefill_chunks(prompt, engine.reserve(tokens))}
    assert paths == ({MHA, OWNED} if dcp == 1 else set(PrefillPath))
    layout = Layout(tp=dcp, dcp_size=dcp, page_size=PAGE, weights="float32", kv_dtype="float32")
    steps = Deployment(
        runner.model.cfg,
        layout,
        max_model_len=tokens,
        max_total_tokens=tokens,
        chunked_prefill_size=chunk,
        prefill=EVERY_PATH,
    ).steps(tokens)
    planned = {shape.path: shape for name, shape in steps.items() if name != "decode"}
    assert set(planned) == paths
    for (shapes, opts, _), program in runner._programs.items():
        shape = planned[opts.path]
        assert (shape.rows, shape.tokens) in shapes, "the plan has another shape than what ran"
        measured = program.run.memory_analysis().temp_size_in_bytes
        assert measured <= workspace(runner.model.cfg, layout, shape).peak, opts.path
