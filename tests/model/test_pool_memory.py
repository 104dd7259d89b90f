"""No step copies a cache: its temporary memory does not grow with the pool."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcp_jax.engine.runner import Row, Runner
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import open_runner

PAGES = (128, 4096)  # both more than the smallest bucket of page tables
# The programs never run: machine code need not be good. What is copied is decided before.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
OWNED, GATHERED = PrefillPath.OWNED, PrefillPath.GATHERED


@dataclass(frozen=True)
class Case:
    id: str
    kv_dtype: str
    dcp: int
    index_cache: str
    path: PrefillPath
    tokens: int = 1


# Decode of every dtype with and without DCP: a single row is where XLA fused a write into its read.
CASES = [
    Case("f32_w1_decode", "float32", 1, "sharded", OWNED),
    Case("f32_w1_prefill", "float32", 1, "replicated", GATHERED, 16),
    Case("bf16_w1_decode", "bfloat16", 1, "replicated", OWNED),
    Case("fp8_w1_decode", "fp8_e4m3", 1, "sharded", OWNED),
    Case("fp8_w1_prefill", "fp8_e4m3", 1, "replicated", GATHERED, 16),
    Case("f32_w4_decode", "float32", 4, "sharded", OWNED),
    Case("f32_w4_owned_replicated", "float32", 4, "replicated", OWNED, 16),
    Case("bf16_w4_owned", "bfloat16", 4, "sharded", OWNED, 16),
    Case("bf16_w4_gathered_replicated", "bfloat16", 4, "replicated", GATHERED, 16),
    Case("fp8_w4_decode", "fp8_e4m3", 4, "sharded", OWNED),
    Case("fp8_w4_owned", "fp8_e4m3", 4, "replicated", OWNED, 16),
    Case("fp8_w4_gathered", "fp8_e4m3", 4, "sharded", GATHERED, 16),
]


@pytest.fixture(scope="module")
def temporary_bytes(checkpoint: Callable[..., Path]) -> Callable[[Case, int], int]:
    """Temporary memory of a case's step on one rank."""
    directory = checkpoint(
        num_hidden_layers=2, indexer_types=["full"] * 2, mlp_layer_types=["dense"] * 2
    )

    def measure(case: Case, pages: int) -> int:
        runner: Runner = open_runner(
            directory,
            tp=case.dcp,
            dcp_size=case.dcp,
            tokens=pages * 4 * case.dcp,
            page_size=4,
            kv_dtype=case.kv_dtype,
            index_cache=case.index_cache,
        )
        row = Row([1] * case.tokens, 0, range(8))
        traced = runner.trace([row], path=case.path)
        compiled = traced.lower().compile(compiler_options=FAST)
        return compiled.memory_analysis().temp_size_in_bytes

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_temporary_memory_is_independent_of_the_pool(temporary_bytes, case: Case):
    small, large = (temporary_bytes(case, pages) for pages in PAGES)
    assert small == large > 0
