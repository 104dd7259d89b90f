"""What a step exchanges, counted in its StableHLO, against the list of the design."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from dcp_jax.dcp.traffic import collectives
from dcp_jax.engine.runner import Row, Runner
from dcp_jax.policy import PrefillPath

OPS = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "collective_permute")
OPS += ("collective_broadcast",)
ITEM_BYTES = {"i1": 1, "ui8": 1, "ui16": 2, "bf16": 2, "i32": 4, "ui32": 4, "f32": 4, "i64": 8}

# The model: layer 0 full and dense, layer 1 shared and sparse, layer 2 full and sparse.
K, HEADS, HIDDEN, LATENT, ROPE, INDEX = 256, 8, 32, 32, 8, 16
PAGE_SIZE, PAGES = 4, 128
# ceil(K/W + 8 sqrt(K (W-1)) / W): what a rank sends when candidates are pruned.
PRUNED = {2: 192, 3: 146, 4: 120, 8: 75}


@dataclass(frozen=True)
class Exchange:
    """One collective of the program; `loops` are the loops that it stands in."""

    layer: int | None
    kind: str
    op: str
    axes: tuple[str, ...]
    operand_bytes: int
    result_bytes: int
    loops: int


def tensor_bytes(kind: str) -> int:
    *shape, item = re.fullmatch(r"tensor<(.*)>", kind).group(1).split("x")
    return math.prod(map(int, shape)) * ITEM_BYTES[item]


def exchanges(traced) -> Iterator[Exchange]:
    """The collectives of a traced step, read from its StableHLO module."""
    module = traced.lower().compiler_ir("stablehlo")
    functions = {
        str(f.operation.attributes["sym_name"]).strip('"'): f.operation
        for f in module.body.operations
        if f.operation.name == "func.func"
    }

    def walk(operation, loops: int) -> Iterator[Exchange]:
        name = operation.name.removeprefix("stablehlo.")
        if name in OPS:
            scope = str(operation.location)
            layer, kind = re.search(r"layer(\d+)/", scope), re.search(r"exchange\.(\w+)", scope)
            yield Exchange(
                layer=int(layer.group(1)) if layer else None,
                kind=kind.group(1) if kind else "",
                op=name,
                axes=tuple(
                    re.findall(r'name = "(\w+)"', str(operation.attributes["replica_groups"]))
                ),
                operand_bytes=sum(tensor_bytes(str(v.type)) for v in operation.operands),
                result_bytes=sum(tensor_bytes(str(v.type)) for v in operation.results),
                loops=loops,
            )
        if name == "func.call":
            callee = str(operation.attributes["callee"]).removeprefix("@")
            yield from walk(functions[callee], loops)
        inside = loops + (name in ("while", "if", "case"))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield from walk(inner.operation, inside)

    yield from walk(functions["main"], 0)


@dataclass(frozen=True)
class Case:
    id: str
    tp: int
    dcp: int
    index_cache: str = "sharded"
    dcp_comm: str = "a2a"
    candidates: str = "pruned"
    path: PrefillPath = PrefillPath.OWNED
    tokens: int = 1
    kv_dtype: str = "float32"
    chunk_rows: int = 4096

    @property
    def options(self) -> dict:
        return {
            "dcp_comm": self.dcp_comm,
            "candidates": self.candidates,
            "path": self.path,
            "gather_chunk_tokens": self.chunk_rows * self.dcp,
        }

    def chunks(self, local_keys: int) -> tuple[int, int]:
        """How many there are, and the rows of one: whole pages, as equal as can be."""
        pages = local_keys // PAGE_SIZE
        count = -(-pages // min(self.chunk_rows // PAGE_SIZE, pages))
        return count, -(-pages // count) * PAGE_SIZE


GATHERED, SPLIT = PrefillPath.GATHERED, PrefillPath.GATHERED_SPLIT_INDEXER
MHA = PrefillPath.MHA_ONE_SHOT
CASES = [
    Case("decode_2", 2, 2),
    Case("decode_3", 3, 3),
    Case("decode_4", 4, 4),
    Case("decode_8", 8, 8),
    Case("decode_8_of_2_ranks", 8, 2),
    Case("decode_full_width_2", 2, 2, candidates="full"),
    Case("decode_full_width_8", 8, 8, candidates="full"),
    Case("decode_ag_rs_4", 4, 4, dcp_comm="ag_rs"),
    Case("decode_ag_rs_3_full_width", 3, 3, dcp_comm="ag_rs", candidates="full"),
    Case("decode_replicated_8", 8, 8, index_cache="replicated"),
    Case("decode_replicated_ag_rs_2_of_4", 4, 2, index_cache="replicated", dcp_comm="ag_rs"),
    Case("decode_fp8_4", 4, 4, kv_dtype="fp8_e4m3"),
    Case("owned_prefill_4", 4, 4, tokens=16),
    Case("gathered_2", 2, 2, path=GATHERED, tokens=16),
    Case("gathered_8_of_4_ranks", 8, 4, path=GATHERED, tokens=16),
    Case("gathered_3_in_chunks", 3, 3, path=GATHERED, tokens=16, chunk_rows=128),
    Case("gathered_replicated_4", 4, 4, path=GATHERED, tokens=16, index_cache="replicated"),
    Case("gathered_fp8_8", 8, 8, path=GATHERED, tokens=16, kv_dtype="fp8_e4m3"),
    Case("split_3_in_chunks", 3, 3, path=SPLIT, tokens=16, chunk_rows=128),
    Case("split_replicated_8_of_4_ranks", 8, 4, path=SPLIT, tokens=16, index_cache="replicated"),
    Case("dense_4", 4, 4, path=MHA, tokens=16),
]


def expected(case: Case, local_keys: int) -> Counter:
    """(layer, kind, op, axes, operand bytes, loops around it) -> how many, from the design.

    `local_keys` are the rows of the page table on one rank.
    """
    n, dcp, tp = case.tokens, case.dcp, case.tp
    local_heads = -(-HEADS // tp)
    group_heads = local_heads * dcp
    both = ("model", "dcp")
    found = Counter()

    def add(layer, kind, op, axes, size, loops=0):
        found[layer, kind, op, axes, size, loops] += 1

    def sum_over_tp(layer):
        add(layer, "tp_sum", "all_reduce", both, n * HIDDEN * 4)

    sum_over_tp(None)  # the embedding
    for layer, full in ((0, True), (1, False), (2, True)):
        if case.path.gathers:
            fp8 = case.kv_dtype == "fp8_e4m3"
            item, rope_item = (1, 2) if fp8 else (4, 4)
            chunks, rows = case.chunks(local_keys)
            # The first chunk stands before the loop over the others.
            for loops in (0, 1) if chunks > 1 else (0,):
                if full and case.index_cache == "sharded":
                    add(layer, "index_k", "all_gather", ("dcp",), rows * INDEX * item, loops)
                    if fp8:
                        add(layer, "index_k", "all_gather", ("dcp",), rows * 4, loops)
                add(layer, "latent", "all_gather", ("dcp",), rows * LATENT * item, loops)
                add(layer, "latent", "all_gather", ("dcp",), rows * ROPE * rope_item, loops)
                if fp8:
                    add(layer, "latent", "all_gather", ("dcp",), rows * 4, loops)
            if full and case.path is SPLIT:
                add(layer, "topk", "all_gather", ("dcp",), -(-n // dcp) * K * 4)
        elif case.path is MHA:  # the whole table at once, and nothing to select
            add(layer, "latent", "all_gather", ("dcp",), local_keys * LATENT * 4)
            add(layer, "latent", "all_gather", ("dcp",), local_keys * ROPE * 4)
        else:
            if full and case.index_cache == "sharded":
                sent = K if case.candidates == "full" else PRUNED[dcp]
                add(layer, "candidates", "all_gather", ("dcp",), n * sent * 6)
            add(layer, "q", "all_gather", ("dcp",), n * local_heads * (LATENT + ROPE) * 4)
            if case.dcp_comm == "a2a":
                add(layer, "merge", "all_to_all", ("dcp",), n * group_heads * (LATENT + 1) * 4)
            else:
                add(layer, "merge", "all_gather", ("dcp",), n * group_heads * 4)
                add(layer, "merge", "reduce_scatter", ("dcp",), n * group_heads * LATENT * 4)
        sum_over_tp(layer)  # attention
        sum_over_tp(layer)  # feed-forward, dense or sparse
    add(None, "argmax", "all_gather", both, 8)
    return found


@pytest.fixture(scope="module")
def open_case(checkpoint: Callable[..., Path], runners: Callable[..., Runner]):
    directory = checkpoint(
        index_topk=K,
        mlp_layer_types=["dense", "sparse", "sparse"],
    )

    def open_one(tp: int, dcp: int, **options) -> Runner:
        tokens = PAGES * PAGE_SIZE * dcp
        return runners(
            directory, tp=tp, dcp_size=dcp, tokens=tokens, page_size=PAGE_SIZE, **options
        )

    return open_one


def trace(runner: Runner, tokens: int, **options):
    """A step of one row at the end of a context that fills its page table."""
    return runner.trace([Row([1] * tokens, 0, range(PAGES))], **options)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_step_has_the_designs_collectives(open_case, case: Case):
    runner = open_case(case.tp, case.dcp, index_cache=case.index_cache, kv_dtype=case.kv_dtype)
    traced = trace(runner, case.tokens, **case.options)
    found = list(exchanges(traced))
    listed = Counter((e.layer, e.kind, e.op, e.axes, e.operand_bytes, e.loops) for e in found)
    leaves = jax.tree_util.tree_leaves_with_path(traced.in_avals)
    (table,) = (leaf for path, leaf in leaves if "page_table" in jax.tree_util.keystr(path))
    local_keys = table.shape[1] * PAGE_SIZE
    assert local_keys >= K, "or pruning cuts nothing"
    assert listed == expected(case, local_keys)
    # `explain` and the benches report this count; it reads the jaxpr, the test reads StableHLO.
    chunks, _ = case.chunks(local_keys)
    received: Counter[str] = Counter()
    for e in found:
        ranks = {"dcp": case.dcp, "model": case.tp // case.dcp}
        size = math.prod(ranks[axis] for axis in e.axes)
        # The difference is what came in; a sum runs as reduce-scatter + all-gather.
        moved = {
            "all_gather": e.result_bytes - e.operand_bytes,
            "all_to_all": e.operand_bytes * (size - 1) / size,
            "reduce_scatter": e.operand_bytes - e.result_bytes,
            "all_reduce": 2 * e.operand_bytes * (size - 1) / size,
        }[e.op]
        received[e.kind] += round(moved) * (chunks - 1 if e.loops else 1)
    reported: Counter[str] = Counter()
    for c in collectives(traced.jaxpr, dict(runner.model.mesh.shape)):
        reported[c.kind] += c.received_bytes
    assert reported == pytest.approx(received, abs=chunks * len(found))


@pytest.mark.parametrize("tokens", [1, 16])
def test_one_rank_has_no_collective(open_case, tokens: int):
    traced = trace(open_case(1, 1), tokens, path=GATHERED if tokens > 1 else PrefillPath.OWNED)
    assert list(exchanges(traced)) == []
    optimized = traced.lower().compile().as_text()
    assert not re.search("|".join(op.replace("_", "-") for op in OPS), optimized)


def test_tensor_parallelism_alone_has_no_dcp_collective(open_case):
    """W = 1, tp = 4: two sums a layer, the embedding's and the argmax; nothing over `dcp` alone."""
    traced = trace(open_case(4, 1), 1)
    kinds = Counter((e.layer, e.kind, e.op) for e in exchanges(traced))
    sums = {(layer, "tp_sum", "all_reduce"): 2 for layer in range(3)}
    assert kinds == {
        (None, "tp_sum", "all_reduce"): 1,
        **sums,
        (None, "argmax", "all_gather"): 1,
    }
    optimized = traced.lower().compile().as_text()
    ops = Counter(re.findall(rf"= \S+ ({'|'.join(OPS).replace('_', '-')})(?:-start)?\(", optimized))
    assert ops.keys() <= {"all-reduce", "all-gather"}
    assert ops["all-reduce"] <= 7
    assert ops["all-gather"] == 1
