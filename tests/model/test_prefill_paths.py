"""Every prefill path selects, says and leaves in the caches what one rank does in one step.

The truth of a case is the `OWNED` path at W = 1, each sequence whole in one step: logits, selected
sets, and the greedy tokens that follow. Each case reads a prefix, then new tokens (in chunks of at
most 16, by the path under test, the policy being asked per chunk), and decodes three tokens.

Sets are compared where the truth's margin at the K-th place exceeds 1e-4 of the spread of the
scores. All steps of a runner share few shapes, because compiling them is what costs.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dcp_jax.layers.indexer as indexer
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.paths import parallelism, prefill_options
from dcp_jax.engine.runner import Runner, StepResult
from dcp_jax.policy import PrefillPath, PrefillPolicy, ineligible
from dcp_jax.reports import selected_positions
from dcp_jax.testing.harness import Sequence, advance, deal, open_runner
from pallas_kernels import reference

PAGE_SIZE = 2  # rows: a page is 2 W tokens
CHUNK = 16
DECODE = 3
TEXT = 72  # the longest case: three pages of 16, 21 new tokens, 3 decoded
ROWS = 3  # of a case; one more fills the bucket of four
FLOAT32, FP8 = "float32", "fp8_e4m3"
MHA, GATHERED = PrefillPath.MHA_ONE_SHOT, PrefillPath.GATHERED
SPLIT, OWNED = PrefillPath.GATHERED_SPLIT_INDEXER, PrefillPath.OWNED
# Of logits with a deviation of 2: float32 measured 2e-5. In FP8 caches (e4m3, and bf16 for k_pe) of
# layers above the first a value may round the other way, by up to 1/16: single logits were off
# by 2e-2 then, and rows by 1e-3 in the mean.
ATOL = {FLOAT32: 2e-4, FP8: 6e-2}
MEAN = {FLOAT32: 1e-5, FP8: 5e-3}
MARGIN = 1e-4
MOST_EXCLUDED = 0.03

PREFIXES: dict[str, Callable[[int], int]] = {
    "0": lambda W: 0,
    "1": lambda W: 1,
    "W-1": lambda W: W - 1,
    "page-1": lambda W: PAGE_SIZE * W - 1,
    "page": lambda W: PAGE_SIZE * W,
    "page+1": lambda W: PAGE_SIZE * W + 1,
    "several": lambda W: 3 * PAGE_SIZE * W,
}
EXTENDS: dict[str, Callable[[int], int]] = {
    "1": lambda W: 1,
    "W-1": lambda W: W - 1,
    "7": lambda W: 7,
    "page": lambda W: PAGE_SIZE * W,
    "chunk+": lambda W: CHUNK + 5,
}


@dataclass(frozen=True)
class Setup:
    """A runner: `chunk_pages` of each row are gathered at a time, out of 5 (W = 8) to 36."""

    golden: str
    tp: int
    dcp_size: int
    kv_dtype: str
    index_cache: str = "sharded"
    dcp_comm: str = "a2a"
    chunk_pages: int = 1


SETUPS = {
    (1, FLOAT32): Setup("p3", 1, 1, FLOAT32),
    (1, FP8): Setup("p2", 1, 1, FP8),
    (2, FLOAT32): Setup("p2", 4, 2, FLOAT32),
    (2, FP8): Setup("p4", 2, 2, FP8, "replicated", "ag_rs", 3),
    (3, FLOAT32): Setup("p1", 3, 3, FLOAT32, "replicated", "a2a", 5),
    (3, FP8): Setup("p1", 3, 3, FP8, "sharded", "ag_rs", 100),
    (4, FLOAT32): Setup("p4", 4, 4, FLOAT32, "sharded", "ag_rs", 3),
    (4, FP8): Setup("p3", 4, 4, FP8),
    (8, FLOAT32): Setup("p1", 8, 8, FLOAT32),
    (8, FP8): Setup("p2", 8, 8, FP8, "sharded", "a2a", 2),
}


@dataclass(frozen=True)
class Case:
    """Rows (prefix, extend) of one batch on the runner of (W, kv_dtype).

    Attributes:
        id: its name.
        setup: where it runs.
        rows: tokens of each row.
        prefix_path: how the prefixes get into the caches.
        exact_shape: no other row fills the batch, so that the step is one token wide.
    """

    id: str
    setup: Setup
    rows: tuple[tuple[int, int], ...]
    prefix_path: PrefillPath = OWNED
    exact_shape: bool = False


# (prefix, extend, W, kv_dtype): every pair of values at least once.
PAIRS = (
    ("0", "1", 1, FLOAT32),
    ("1", "page", 1, FLOAT32),
    ("W-1", "7", 1, FLOAT32),
    ("several", "7", 1, FLOAT32),
    ("page-1", "page", 1, FP8),
    ("page", "chunk+", 1, FP8),
    ("page+1", "chunk+", 1, FP8),
    ("1", "W-1", 2, FLOAT32),
    ("W-1", "1", 2, FLOAT32),
    ("page+1", "7", 2, FLOAT32),
    ("0", "chunk+", 2, FP8),
    ("page-1", "7", 2, FP8),
    ("page", "page", 2, FP8),
    ("several", "W-1", 2, FP8),
    ("0", "7", 3, FLOAT32),
    ("1", "chunk+", 3, FLOAT32),
    ("page-1", "1", 3, FLOAT32),
    ("page", "W-1", 3, FLOAT32),
    ("page+1", "page", 3, FLOAT32),
    ("several", "chunk+", 3, FLOAT32),
    ("W-1", "W-1", 3, FP8),
    ("page-1", "W-1", 4, FLOAT32),
    ("page", "7", 4, FLOAT32),
    ("page+1", "1", 4, FLOAT32),
    ("0", "page", 4, FP8),
    ("1", "1", 4, FP8),
    ("W-1", "chunk+", 4, FP8),
    ("several", "1", 4, FP8),
    ("0", "W-1", 8, FLOAT32),
    ("1", "7", 8, FLOAT32),
    ("page-1", "chunk+", 8, FLOAT32),
    ("page+1", "W-1", 8, FLOAT32),
    ("several", "page", 8, FLOAT32),
    ("W-1", "page", 8, FP8),
    ("page", "1", 8, FP8),
)


def grid() -> list[tuple]:
    """Every combination; one rank has no W - 1 tokens to read."""
    every = itertools.product(PREFIXES, EXTENDS, (1, 2, 3, 4, 8), (FLOAT32, FP8))
    return [row for row in every if EXTENDS[row[1]](row[2]) > 0]


def case_of(prefix: str, extend: str, W: int, kv_dtype: str, setup: Setup | None = None) -> Case:
    setup = setup or SETUPS[W, kv_dtype]
    name = f"w{W}-{kv_dtype}-{setup.golden}-prefix_{prefix}-extend_{extend}"
    return Case(name, setup, ((PREFIXES[prefix](W), EXTENDS[extend](W)),))


def corner(name: str, W: int, kv_dtype: str, *rows: tuple[int, int], **options) -> Case:
    return Case(f"w{W}-{kv_dtype}-{name}", SETUPS[W, kv_dtype], rows, **options)


INDEX_TOPK = {"p1": 8, "p2": 12, "p3": 16, "p4": 8}
CORNERS = [
    corner("one_rank_walks_over_topk", 1, FLOAT32, (0, 15), (3, 12), (0, 1)),
    corner("one_rank_mixed_lengths", 1, FP8, (0, 1), (0, 21), (17, 4)),
    corner("fills_topk", 2, FLOAT32, (0, 12)),
    corner("one_beyond_topk", 2, FLOAT32, (0, 13)),
    corner("prefixes_beside_none", 2, FLOAT32, (5, 3), (0, 12), (11, 1)),
    corner("dense_prefix_then_sparse", 2, FP8, (8, 9), (1, 21), prefix_path=MHA),
    corner("mixed_lengths", 2, FP8, (0, 1), (0, 7), (12, 21)),
    corner("a_long_row_among_short", 3, FLOAT32, (0, 1), (40, 2), (0, 8)),
    corner("split_of_fewer_tokens_than_ranks", 3, FLOAT32, (9, 2), (0, 1)),
    corner("prefix_written_split", 3, FLOAT32, (18, 5), (7, 7), prefix_path=SPLIT),
    corner("one_token_each", 3, FP8, (0, 1), (5, 1), (30, 1), exact_shape=True),
    corner("short_rows_behind_prefixes", 3, FP8, (2, 3), (0, 8), (7, 1)),
    corner("new_tokens_of_some_ranks_only", 4, FLOAT32, (3, 2), (0, 3), (6, 1)),
    corner("ends_of_pages", 4, FLOAT32, (8, 8), (7, 1), (15, 2)),
    corner("walks_over_topk", 4, FP8, (0, 15), (12, 3), (1, 14)),
    corner("three_chunks", 4, FP8, (0, 37), (24, 16)),
    corner("fewer_tokens_than_ranks", 8, FLOAT32, (0, 1), (0, 7), (1, 1)),
    corner("the_same_text_at_every_offset", 8, FLOAT32, (15, 5), (16, 5), (17, 5)),
    corner("dense_prefix_of_few_ranks", 8, FP8, (5, 7), (1, 11), (12, 20), prefix_path=MHA),
    corner("several_pages_beside_none", 8, FP8, (48, 21), (0, 21), (48, 1)),
]


# A setup's cases one after the other: two workers then share few programs.
CASES = sorted(
    [*(case_of(*row) for row in PAIRS), *CORNERS],
    key=lambda c: list(SETUPS.values()).index(c.setup),
)


def pairs(row: tuple) -> set:
    return set(itertools.combinations(enumerate(row), 2))


def test_the_list_covers_every_pair_of_the_grid():
    assert set().union(*map(pairs, PAIRS)) == set().union(*map(pairs, grid()))
    assert set(PAIRS) <= set(grid())


def test_the_setups_cover_what_else_may_differ():
    """Every golden case with each dtype; caches and exchanges with each; many sizes of a chunk."""
    values = SETUPS.values()
    assert {(s.golden, s.kv_dtype) for s in values} == set(
        itertools.product(("p1", "p2", "p3", "p4"), (FLOAT32, FP8))
    )
    ranks = [s for s in values if s.dcp_size > 1]
    assert {(s.index_cache, s.kv_dtype) for s in ranks} == set(
        itertools.product(("sharded", "replicated"), (FLOAT32, FP8))
    )
    assert {s.dcp_comm for s in ranks} == {"a2a", "ag_rs"}
    assert any(s.tp > s.dcp_size for s in ranks)
    assert len({c.id for c in CORNERS}) == 20
    assert all(len(c.rows) <= ROWS for c in CORNERS)
    for kv_dtype in (FLOAT32, FP8):
        dense = [c for c in CASES if max(map(sum, c.rows)) <= INDEX_TOPK[c.setup.golden]]
        assert len({c.setup for c in dense if c.setup.kv_dtype == kv_dtype}) >= 4


@dataclass
class Seen:
    """What a sequence's steps gave, by position.

    Attributes:
        logits: float32 [TEXT, vocab].
        sets: per full layer int32 [TEXT, K], ascending, -1 pads.
    """

    logits: np.ndarray
    sets: dict[int, np.ndarray]

    @classmethod
    def nothing(cls, cfg) -> "Seen":
        sets = {layer: np.full((TEXT, cfg.index_topk), -2, np.int32) for layer in cfg.full_layers}
        return cls(np.full((TEXT, cfg.vocab_size), np.nan, np.float32), sets)

    def add(self, result: StepResult, row: int, start: int, count: int) -> None:
        """One row's part of a step; every rank attended to what it owns, and counted it."""
        self.logits[start : start + count] = result.logits[row, :count]
        for layer, of_step in self.sets.items():
            shares = result.explanation.positions[layer][:, row, :count]
            ranks = np.arange(len(shares))[:, None, None]
            assert ((shares < 0) | (shares % len(shares) == ranks)).all()
            counts = result.explanation.counts[layer][:, row, :count]
            np.testing.assert_array_equal(counts, (shares >= 0).sum(axis=-1))
            of_step[start : start + count] = selected_positions(shares, of_step.shape[1])


@dataclass
class Truth:
    """One rank, one step: what it saw, and the margins of its selections.

    Attributes:
        runner: of a golden case, W = 1.
        margins: per ordinal of an indexer, [rows, TEXT]: the margin at the K-th place in shares of
            the spread of the scores; infinite where everything visible is selected.
    """

    runner: Runner
    margins: dict[int, np.ndarray] = field(default_factory=dict)

    def see(self, sequences: list[list[int]]) -> list[Seen]:
        """Read sequences of TEXT tokens each."""
        cfg, rows = self.runner.model.cfg, deal(self.runner, sequences)
        with self._margins_kept():
            result = advance(self.runner, rows, logits="all", explain=True)
            jax.effects_barrier()
        seen = [Seen.nothing(cfg) for _ in rows]
        for row, one in enumerate(seen):
            one.add(result, row, 0, TEXT)
            for of_layer in one.sets.values():
                counts = (of_layer >= 0).sum(axis=-1)
                np.testing.assert_array_equal(
                    counts, np.minimum(np.arange(TEXT) + 1, cfg.index_topk)
                )
        return seen

    def certain(self, row: int) -> dict[int, np.ndarray]:
        """bool [TEXT] per full layer: where the selection does not hang on rounding."""
        layers = self.runner.model.cfg.full_layers
        return {layer: self.margins[i][row] > MARGIN for i, layer in enumerate(layers)}

    @contextmanager
    def _margins_kept(self) -> Iterator[None]:
        """The scores of the very queries and keys of the step, by the reference's scorer."""
        index_topk, spec = indexer.index_topk, self.runner.spec

        def spy(q, weights, keys, scale, pages, lengths, *, k, page_size, base_row, **options):
            where = {"page_size": page_size, "base_row": base_row}
            scores = reference.index_scores(q, weights, keys, scale, pages, lengths, **where)
            best = jax.lax.top_k(scores, k + 1)[0]
            lowest = jnp.min(jnp.where(scores == -jnp.inf, jnp.inf, scores), axis=-1)
            margin = (best[..., -2] - best[..., -1]) / (best[..., 0] - lowest)
            margin = jnp.where(lengths <= k, jnp.inf, margin)
            ordinal = base_row // spec.index_rows
            jax.debug.callback(partial(self.margins.__setitem__, ordinal), margin)
            return index_topk(q, weights, keys, scale, pages, lengths, k=k, **where, **options)

        indexer.index_topk = spy
        try:
            yield
        finally:
            indexer.index_topk = index_topk


@pytest.fixture(scope="module")
def truth(golden) -> Callable[[str, str], Truth]:
    opened: dict[tuple, Truth] = {}

    def get(name: str, kv_dtype: str) -> Truth:
        if (name, kv_dtype) not in opened:
            sizes = {"tokens": ROWS * TEXT, "largest_step": TEXT, "kv_dtype": kv_dtype}
            opened[name, kv_dtype] = Truth(open_runner(golden(name).path, **sizes))
        return opened[name, kv_dtype]

    return get


@pytest.fixture(scope="module")
def open_setup(golden, runners: Callable[..., Runner]) -> Callable[[Setup], Runner]:
    def get(setup: Setup) -> Runner:
        page = PAGE_SIZE * setup.dcp_size
        pages = ROWS * pages_needed(TEXT, PAGE_SIZE, setup.dcp_size) + 1
        return runners(
            golden(setup.golden).path,
            tp=setup.tp,
            dcp_size=setup.dcp_size,
            tokens=pages * page,
            page_size=PAGE_SIZE,
            kv_dtype=setup.kv_dtype,
            index_cache=setup.index_cache,
            dcp_comm=setup.dcp_comm,
            gather_chunk_tokens=setup.chunk_pages * page * (ROWS + 1),
            logits="all",
            explain=True,
        )

    return get


def texts(golden, case: Case) -> list[list[int]]:
    """TEXT tokens of the golden case's own text for each row, from different places of it."""
    arrays = golden.arrays
    ids = arrays["input_ids"][arrays["attention_mask"].astype(bool)]
    first = sum(map(sum, case.rows))
    return [np.resize(np.roll(ids, -first - 19 * i), TEXT).tolist() for i in range(len(case.rows))]


def poison(runner: Runner) -> None:
    """NaN in every row of every cache, of bytes too."""

    def nan(leaf):
        value = 0x7F if leaf.dtype == jnp.uint8 else jnp.nan
        return jnp.full(leaf.shape, value, leaf.dtype, device=leaf.sharding)

    runner.cache = jax.tree.map(nan, runner.cache)


@dataclass
class Run:
    """Sequences of a batch on a runner, and what their steps gave."""

    runner: Runner
    sequences: list[Sequence]
    filler_page: int
    seen: list[Seen]
    fill: bool = True

    def read(self, ends: list[int], path: PrefillPath) -> None:
        """Read every sequence up to its end, a chunk per step."""
        group = parallelism(self.runner.model)
        while active := [i for i, s in enumerate(self.sequences) if s.cached < ends[i]]:
            counts = [min(CHUNK, ends[i] - self.sequences[i].cached) for i in active]
            starts = [self.sequences[i].cached for i in active]
            how = prefill_options(PrefillPolicy(force=path), group, starts, counts)
            self._step(active, counts, filler=2, **how)

    def decode(self) -> None:
        self._step(list(range(len(self.sequences))), [1] * len(self.sequences), filler=1)

    def _step(self, active: list[int], counts: list[int], *, filler: int, **changes) -> None:
        starts = [self.sequences[i].cached for i in active]
        rows = [self.sequences[i] for i in active]
        if self.fill:  # another row makes all steps of one shape
            rows.append(Sequence([5] * filler, [self.filler_page]))
            counts = [*counts, filler]
        result = advance(self.runner, rows, counts, **changes)
        assert result.reruns == 0
        for row, i in enumerate(active):
            self.seen[i].add(result, row, starts[row], counts[row])


def eligible(runner: Runner, kv_len: int) -> list[PrefillPath]:
    group = parallelism(runner.model)
    return [p for p in PrefillPath if ineligible(p, PrefillPolicy(), kv_len, group) is None]


def check(case: Case, golden, truth, open_setup) -> None:
    """Every eligible path, from the same prefixes, against the truth."""
    runner, alone = open_setup(case.setup), truth(case.setup.golden, case.setup.kv_dtype)
    text, cfg = texts(golden(case.setup.golden), case), runner.model.cfg
    prefixes, ends = [p for p, _ in case.rows], [sum(row) for row in case.rows]
    dealt = deal(runner, [[5, 5], *(t[:end] for t, end in zip(text, ends, strict=True))])
    assert cfg.index_topk == INDEX_TOPK[case.setup.golden]
    paths = eligible(runner, max(ends))
    assert (MHA in paths) == (max(ends) <= cfg.index_topk)
    assert {OWNED} | ({GATHERED, SPLIT} if runner.dcp_size > 1 else set()) <= set(paths)
    poison(runner)
    filler, *sequences = dealt
    for sequence, end in zip(sequences, ends, strict=True):
        room = pages_needed(end + DECODE, PAGE_SIZE, runner.dcp_size) - len(sequence.pages)
        used = {p for s in dealt for p in s.pages}
        sequence.pages += [p for p in range(runner.spec.pages) if p not in used][:room]
    seen = [Seen.nothing(cfg) for _ in sequences]
    start = Run(runner, sequences, filler.pages[0], seen, fill=not case.exact_shape)
    start.read(prefixes, case.prefix_path)
    caches = runner.cache
    for path in paths:
        runner.cache = jax.tree.map(jnp.copy, caches)
        run = Run(
            runner, copy.deepcopy(sequences), start.filler_page, copy.deepcopy(seen), start.fill
        )
        run.read(ends, path)
        for _ in range(DECODE):
            run.decode()
        compare(run, ends, text, alone, case.setup.kv_dtype, path)


def compare(run: Run, ends, text, alone: Truth, kv_dtype: str, path: PrefillPath) -> None:
    whole = [
        s.tokens[: end + DECODE] + t[end + DECODE :]
        for s, end, t in zip(run.sequences, ends, text, strict=True)
    ]
    expected = alone.see(whole)
    excluded = np.mean([~c for row in range(len(ends)) for c in alone.certain(row).values()])
    assert excluded < MOST_EXCLUDED
    for row, (got, want, end) in enumerate(zip(run.seen, expected, ends, strict=True)):
        n = end + DECODE
        message = f"{path}, row {row}"
        for layer, certain in alone.certain(row).items():
            sure = certain[:n]
            np.testing.assert_array_equal(
                got.sets[layer][:n][sure], want.sets[layer][:n][sure], err_msg=f"{message} {layer}"
            )
        np.testing.assert_allclose(
            got.logits[:n], want.logits[:n], atol=ATOL[kv_dtype], rtol=0, err_msg=message
        )
        assert np.abs(got.logits[:n] - want.logits[:n]).mean() < MEAN[kv_dtype], message
        greedy = want.logits[end - 1 : n].argmax(axis=-1).tolist()
        assert run.sequences[row].tokens[end:] == greedy, message


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_every_path_equals_one_rank(case, golden, truth, open_setup):
    check(case, golden, truth, open_setup)


@pytest.mark.full_grid
@pytest.mark.parametrize("name", INDEX_TOPK)
@pytest.mark.parametrize("key", SETUPS)
def test_every_path_equals_one_rank_everywhere(key, name, golden, truth, open_setup):
    setup = replace(SETUPS[key], golden=name)
    for row in grid():
        if row[2:] == key:
            check(case_of(*row, setup), golden, truth, open_setup)
