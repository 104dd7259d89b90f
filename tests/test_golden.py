"""The model against the reference: every golden case, over an all-pairs list of options.

The list covers every pair of values of (tp, dcp_size), index cache, exchange, prefill path, page
size and case; `-m full_grid` runs every combination.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dcp_jax.cache.pool import CacheSpec
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.step import StepOptions
from dcp_jax.engine.runner import Row, Runner
from dcp_jax.mesh import make_mesh
from dcp_jax.model import Model
from dcp_jax.policy import PrefillPath
from dcp_jax.reports import row_of, selected_positions
from dcp_jax.weights.hf import load_hf

# The reference's own noise floor is 1e-5 to 4e-5 (tests/golden/README.md).
ATOL = 2e-4
LAYOUTS = ((1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (4, 2), (8, 4))


@dataclass(frozen=True)
class Case:
    tp: int
    dcp_size: int
    index_cache: Any
    dcp_comm: Any
    path: str
    page_size: int
    golden: str

    @property
    def id(self) -> str:
        layout = f"{self.golden}-tp{self.tp}-dcp{self.dcp_size}"
        return f"{layout}-{self.index_cache}-{self.dcp_comm}-{self.path}-page{self.page_size}"


PAIRS = [
    Case(*row)
    for row in (
        (1, 1, "sharded", "a2a", "owned", 64, "p1"),
        (1, 1, "sharded", "a2a", "owned", 4, "p2"),
        (1, 1, "sharded", "a2a", "owned", 16, "p3"),
        (1, 1, "sharded", "a2a", "owned", 4, "p4"),
        (2, 2, "sharded", "ag_rs", "gathered", 4, "p1"),
        (2, 2, "replicated", "ag_rs", "gathered", 4, "p2"),
        (2, 2, "replicated", "a2a", "gathered_split_indexer", 16, "p3"),
        (2, 2, "sharded", "ag_rs", "owned", 64, "p4"),
        (3, 3, "sharded", "ag_rs", "gathered_split_indexer", 64, "p1"),
        (3, 3, "replicated", "a2a", "owned", 4, "p2"),
        (3, 3, "replicated", "a2a", "gathered", 64, "p3"),
        (3, 3, "replicated", "a2a", "gathered_split_indexer", 16, "p4"),
        (4, 4, "sharded", "ag_rs", "gathered", 16, "p1"),
        (4, 4, "replicated", "a2a", "owned", 64, "p2"),
        (4, 4, "sharded", "a2a", "owned", 64, "p3"),
        (4, 4, "replicated", "a2a", "gathered_split_indexer", 4, "p4"),
        (8, 8, "sharded", "ag_rs", "gathered_split_indexer", 16, "p1"),
        (8, 8, "replicated", "a2a", "owned", 16, "p2"),
        (8, 8, "sharded", "ag_rs", "gathered", 4, "p3"),
        (8, 8, "sharded", "a2a", "gathered_split_indexer", 64, "p4"),
        (4, 2, "replicated", "a2a", "gathered", 64, "p1"),
        (4, 2, "sharded", "a2a", "gathered_split_indexer", 16, "p2"),
        (4, 2, "sharded", "a2a", "owned", 16, "p3"),
        (4, 2, "sharded", "ag_rs", "owned", 4, "p4"),
        (8, 4, "replicated", "ag_rs", "owned", 4, "p1"),
        (8, 4, "sharded", "ag_rs", "gathered_split_indexer", 64, "p2"),
        (8, 4, "replicated", "ag_rs", "gathered", 16, "p3"),
        (8, 4, "sharded", "a2a", "gathered", 16, "p4"),
    )
]


def _grid() -> list[Case]:
    """Every combination; with one rank the exchanges and paths are one and the same program."""
    options = (
        ("sharded", "replicated"),
        ("a2a", "ag_rs"),
        ("gathered", "gathered_split_indexer", "owned"),
        (4, 16, 64),
        ("p1", "p2", "p3", "p4"),
    )
    cases = [Case(*layout, *rest) for layout in LAYOUTS for rest in itertools.product(*options)]
    alone = ("sharded", "a2a", "owned")
    return [c for c in cases if c.dcp_size > 1 or (c.index_cache, c.dcp_comm, c.path) == alone]


FACTORS = ("index_cache", "dcp_comm", "path", "page_size", "golden")


def _pairs(case: Case) -> set:
    values = [("layout", (case.tp, case.dcp_size)), *((f, getattr(case, f)) for f in FACTORS)]
    return set(itertools.combinations(values, 2))


def test_the_list_covers_every_pair_of_the_grid():
    assert set().union(*map(_pairs, PAIRS)) == set().union(*map(_pairs, _grid()))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in PAIRS])
def test_model_equals_the_reference(case, golden):
    check(case, golden(case.golden))


@pytest.mark.full_grid
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in _grid()])
def test_model_equals_the_reference_everywhere(case, golden):
    check(case, golden(case.golden))


def check(case: Case, golden) -> None:
    """Logits, hidden states, selected sets, experts and greedy tokens; p4's MTP layer too."""
    want = golden.arrays
    cfg = ModelConfig.from_hf(golden.path)
    mesh = make_mesh(case.tp, case.dcp_size)
    model = Model(cfg, mesh, jnp.dtype("float32"), with_mtp=cfg.num_nextn_predict_layers > 0)
    params = load_hf(golden.path, cfg, model.param_defs, mesh)
    mask = want["attention_mask"].astype(bool)
    prompts = [ids[real].tolist() for ids, real in zip(want["input_ids"], mask, strict=True)]
    page_tokens = case.page_size * case.dcp_size
    needed = sum(-(-len(p) // page_tokens) for p in prompts)
    spec = CacheSpec.of(
        cfg,
        with_mtp=model.with_mtp,
        pages=needed + 3,
        page_size=case.page_size,
        dcp_size=case.dcp_size,
        kv_dtype="float32",
        index_replicated=case.index_cache == "replicated",
    )
    opts = StepOptions(
        page_size=case.page_size, dcp_comm=case.dcp_comm, index_cache=case.index_cache
    )
    runner = Runner(model, params, spec, opts)
    path = PrefillPath(case.path)
    # Pages in no order, as after a while of serving.
    pages = np.random.default_rng(0).permutation(spec.pages).tolist()
    rows = []
    for prompt in prompts:
        count = -(-len(prompt) // page_tokens)
        rows.append(Row(prompt, 0, [pages.pop() for _ in range(count)]))
    result = runner.step(rows, path=path, logits="all", explain=True, return_hidden=True)
    for row, (prompt, real) in enumerate(zip(prompts, mask, strict=True)):
        check_prefill(row, len(prompt), real, result, cfg, want)
    if model.with_mtp:
        check_mtp(runner, rows[0], result.hidden, path, cfg, want)
    check_greedy(runner, rows[0], result.logits[0], want)


def check_prefill(row, tokens, real, result, cfg, want) -> None:
    """One row of the batch against the valid positions of the reference's row."""
    padding = int(np.argmax(real))  # left padding shifts the reference's positions
    np.testing.assert_allclose(
        result.logits[row, :tokens], want["logits"][row, real], atol=ATOL, rtol=0
    )
    hidden = np.asarray(result.hidden)[row, :tokens]
    np.testing.assert_allclose(hidden, want["final_norm_out"][row, real], atol=ATOL, rtol=0)
    shares = row_of(result.explanation, row, tokens)
    for number, layer in enumerate(want["indexer_layers"].tolist()):
        chosen = selected_positions(shares.positions[layer], cfg.index_topk)
        expected = want["topk_indices"][number, row, real].astype(np.int32)
        expected = np.where(expected < 0, -1, expected - padding)
        np.testing.assert_array_equal(chosen, expected, err_msg=f"top-k of layer {layer}")
        counts = shares.counts[layer].sum(axis=0)
        np.testing.assert_array_equal(counts, np.minimum(np.arange(tokens) + 1, cfg.index_topk))
    for number, layer in enumerate(want["moe_layers"].tolist()):
        expected = want["expert_ids"][number, row, real]
        np.testing.assert_array_equal(shares.experts[layer], expected, err_msg=f"layer {layer}")


def check_mtp(runner, row, hidden, path, cfg, want) -> None:
    """The NextN layer over the prompt's pairs: h[i] with token i+1."""
    shifted = Row(row.tokens[1:], 0, row.pages)
    result = runner.step_mtp(
        [shifted], hidden, path=path, logits="all", explain=True, return_hidden=True
    )
    valid = want["mtp_valid"][0].astype(bool)
    pairs = int(valid.sum())
    np.testing.assert_allclose(
        result.logits[0, :pairs], want["mtp_logits"][0, valid], atol=ATOL, rtol=0
    )
    got = np.asarray(result.hidden)[0, :pairs]
    np.testing.assert_allclose(got, want["mtp_hidden"][0, valid], atol=ATOL, rtol=0)
    shares = row_of(result.explanation, 0, pairs).positions[cfg.num_hidden_layers]
    np.testing.assert_array_equal(
        selected_positions(shares, cfg.index_topk), want["mtp_topk_indices"][0, valid]
    )


def check_greedy(runner, row, logits, want) -> None:
    """32 greedy tokens by cached decode, from the middle of the row that was just read.

    The rows behind the prompt hold the rest of the reference's text: each step overwrites one.
    """
    prompt, expected = want["greedy_prompt"].tolist(), want["greedy_tokens"].tolist()
    assert list(row.tokens[: len(prompt)]) == prompt
    tokens = [int(logits[len(prompt) - 1].argmax())]
    for step in range(len(expected) - 1):
        tokens += runner.step([Row(tokens[-1:], len(prompt) + step, row.pages)]).next_tokens
    assert tokens == expected
