"""Thresholds fitted to machines whose crossovers are known, and what records cannot say."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from dcp_jax import bench
from dcp_jax.bench.cases import Case, Shape
from dcp_jax.bench.records import Agreement, Record, Setup, Times
from dcp_jax.bench.tables import fit_notes, fit_tables
from dcp_jax.policy import PrefillPath, PrefillPolicy, choose_path, ineligible

DENSE, GATHERED, SPLIT, OWNED = PrefillPath


@dataclass(frozen=True)
class Machine:
    """Costs that are equal on both sides of these crossovers, and part in proportion beyond.

    With n new tokens of s mean keys: scoring takes n s a, split n s a / W + n f with f such that
    both are equal at s = `split`; moving the prefix takes p c, moving queries n H c `owned`; dense
    attention takes (keys / `dense`) ** 2 of the best of these.
    """

    id: str
    dense: float
    split: float
    owned: float
    dcp_size: int = 4
    heads: int = 64
    index_topk: int = 2048
    alpha: float = 0.0  # seconds per step whatever the path: a batch of rows shares them

    def seconds(self, path: PrefillPath, case: Case) -> float:
        batch, ranks = case.tokens, self.dcp_size
        n, s = batch.extend_tokens, batch.mean_keys
        whole = n * s
        split = n * s / ranks + n * self.split * (1 - 1 / ranks)
        unit = n * max(s, self.split) / (1 + self.owned * self.heads * n)
        times = {
            PrefillPath.GATHERED: whole + unit * batch.prefix_tokens,
            PrefillPath.GATHERED_SPLIT_INDEXER: split + unit * batch.prefix_tokens,
            PrefillPath.OWNED: min(whole, split) + unit * self.owned * self.heads * n,
        }
        times = {p: 1e-9 * t + self.alpha for p, t in times.items()}
        if self.dcp_size == 1:
            times = {PrefillPath.OWNED: times[PrefillPath.OWNED]}
        dense = min(times.values()) * (case.keys / self.dense) ** 2
        return {**times, PrefillPath.MHA_ONE_SHOT: dense}[path]

    def policy(self) -> PrefillPolicy:
        """The thresholds that are right here."""
        return PrefillPolicy(
            dense_attn_kv_len_threshold=int(self.dense),
            split_indexer_min_kv=int(self.split),
            owned_prefill_ratio=self.owned,
        )

    @property
    def setup(self) -> Setup:
        return Setup(
            *(self.id, "0", "synthetic", "random", 2, self.dcp_size, self.dcp_size, self.heads),
            *(self.index_topk, "float32", "float32", "sharded", "a2a", 64),
        )


def records_of(
    machine: Machine,
    cases: Iterable[Case],
    *,
    noise: float = 0.0,
    seed: int = 0,
    paths: Iterable[PrefillPath] = tuple(PrefillPath),
    chunk: int = 32768,
    slower: float = 1.0,
) -> list[Record]:
    """What a bench would write; `slower` times the gathered kinds, as a chunk may."""
    rng, found = random.Random(seed), []
    for case in cases:
        for path in paths:
            reason = ineligible(path, PrefillPolicy(), case.keys, machine.setup.group)
            times = None
            if reason is None:
                t = machine.seconds(path, case) * max(rng.gauss(1, noise), 0.1)
                t *= slower if path.gathers else 1.0
                times = Times(t, t, t, 5)
            found.append(
                Record(
                    setup=machine.setup,
                    date="2026-01-01T00:00:00+00:00",
                    case=case,
                    shape=Shape(case.batch, case.extend, 1),
                    part="attention",
                    layer="full",
                    stands_for=1,
                    feed_forward="none",
                    path=path,
                    gather_chunk_tokens=chunk if path.gathers else None,
                    chosen=False,
                    skipped=reason,
                    times=times,
                )
            )
    return found


MACHINES = [
    Machine("all-lower", dense=600, split=1500, owned=0.7),
    Machine("all-higher", dense=1800, split=50_000, owned=12),
    Machine("as-the-defaults", dense=2048, split=8192, owned=3.0),
    Machine("owned-early-split-late", dense=1300, split=40_000, owned=1.5),
    Machine("two-ranks", dense=900, split=3000, owned=6, dcp_size=2, heads=32),
    Machine("latency", dense=1200, split=20_000, owned=1.5, alpha=2e-3),
    Machine("one-rank", dense=700, split=8192, owned=3.0, dcp_size=1),
]
PREFIXES = (0, 512, 1024, 2048, 4096, 16384, 65536, 131072)
GRIDS = {
    "one-row": bench.grid(PREFIXES, (64, 256, 1024, 4096)),
    "rows": bench.grid(PREFIXES, (128, 512, 2048), (1, 4)),
}


def steps_between(machine: Machine, fitted: PrefillPolicy, cases: Iterable[Case]) -> dict[str, int]:
    """Distinct values of the grid on whose side of a threshold the two policies differ.

    Only cases that a threshold decides count: dense attention comes first, then `OWNED`.
    """
    true = machine.policy()
    batches = [case.tokens for case in cases]
    short = [b for b in batches if b.kv_len <= machine.index_topk]
    long_ = [b for b in batches if b.kv_len > min(machine.dense, machine.index_topk)]
    ratios = {b.prefix_tokens / (machine.heads * b.extend_tokens) for b in long_}
    gathered = [
        b for b in long_ if b.prefix_tokens < machine.owned * machine.heads * b.extend_tokens
    ]
    several = machine.dcp_size > 1
    pairs = {
        "dense_attn_kv_len_threshold": {b.kv_len + 0.5 for b in short},
        "owned_prefill_ratio": ratios if several else set(),
        "split_indexer_min_kv": {b.mean_keys for b in gathered} if several else set(),
    }
    return {
        name: sum((v >= getattr(true, name)) != (v >= getattr(fitted, name)) for v in values)
        for name, values in pairs.items()
    }


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("machine", [pytest.param(m, id=m.id) for m in MACHINES])
def test_crossovers_are_recovered(machine: Machine, grid: str):
    cases = GRIDS[grid]
    for noise, seed in ((0.0, 0), (0.02, 1)):
        (found,) = bench.fit(records_of(machine, cases, noise=noise, seed=seed))
        steps = steps_between(machine, found.policy, cases)
        assert max(steps.values()) <= 1, (noise, seed, steps, found.flags)
        default, fitted, best = found.seconds
        assert best <= fitted <= default
        if noise == 0 and machine.id == "as-the-defaults":
            assert found.changes == ()
            assert "no evidence" in fit_notes(found)[1]


def test_the_fit_says_what_it_gains():
    machine = MACHINES[0]
    (found,) = bench.fit(records_of(machine, GRIDS["one-row"]))
    names = ["dense_attn_kv_len_threshold", "split_indexer_min_kv", "owned_prefill_ratio"]
    assert [change.name for change in found.changes] == names
    for change in found.changes:
        assert change.regret_saved > 0.03
        assert change.cases
        assert not change.edge
        assert f"--prefill.{change.name.replace('_', '-')} {change.value}" in found.flags
    assert found.worst_regret[0] > 0.5 > found.worst_regret[1]
    for outcome in found.outcomes:
        batch, group = outcome.case.tokens, machine.setup.group
        assert outcome.default is choose_path(PrefillPolicy(), batch, group)
        assert outcome.fitted is choose_path(found.policy, batch, group)
        assert outcome.best_seconds <= min(outcome.default_seconds, outcome.fitted_seconds)
    console = Console(width=80)
    with console.capture() as captured:
        for table in fit_tables(found):
            console.print(table)
    for text in ("gathered_split_indexer", "owned_prefill_ratio", f"{found.changes[0].value}"):
        assert text in captured.get()


def test_a_crossover_beyond_the_grid_is_called_an_edge():
    machine = Machine("never-owned", dense=2048, split=8192, owned=1000)
    (found,) = bench.fit(records_of(machine, GRIDS["one-row"]))
    (change,) = found.changes
    assert (change.name, change.edge) == ("owned_prefill_ratio", True)
    assert change.value > 131072 / (64 * 64)
    assert "owned_prefill_ratio: the crossover lies beyond the timed cases" in " ".join(
        fit_notes(found)
    )


def test_a_case_without_the_defaults_path_makes_no_claim():
    """The default takes GATHERED on these; only the split kind was timed, and is faster."""
    machine = Machine("split-wins", dense=2048, split=1, owned=1000)
    cases = bench.grid((4096,), (64, 2048))
    (found,) = bench.fit(records_of(machine, cases, paths=(SPLIT,)))
    assert found.outcomes == ()
    assert found.changes == ()
    assert found.no_claim == cases
    assert {path for _, path in found.missing} == {GATHERED, OWNED}
    notes = " ".join(fit_notes(found))
    assert "nothing can be said" in notes
    assert "The default's own path was not timed, so nothing is claimed, for 4096+64" in notes
    assert "Not timed: owned for 4096+64, 4096+2048." in notes


def test_no_threshold_moves_a_case_to_a_path_that_was_not_timed():
    """GATHERED would be half as long on every case but one, where only OWNED was timed."""
    machine = Machine("never-owned", dense=2048, split=10**6, owned=1000)
    near, far = bench.grid((65536,), (64,)), bench.grid((16384, 32768), (64,))
    records = records_of(machine, near, paths=(OWNED,))
    records += records_of(machine, far, paths=(GATHERED, OWNED))
    (found,) = bench.fit(records)
    # Scoring is not split either: that was not timed.
    split, owned = found.changes
    assert (split.name, split.cases) == ("split_indexer_min_kv", far)
    assert 32768 / 64**2 < owned.value <= 65536 / 64**2
    assert (near[0], GATHERED) in found.missing
    assert found.no_claim == ()


def test_a_swept_chunk_is_fitted_too():
    machine = Machine("as-the-defaults", dense=2048, split=8192, owned=3.0)
    cases = GRIDS["one-row"]
    records = records_of(machine, cases)
    assert bench.fit(records + records_of(machine, cases, chunk=8192, slower=1.2))[0].changes == ()
    (found,) = bench.fit(records + records_of(machine, cases, chunk=8192, slower=0.7))
    assert found.policy.gather_chunk_tokens == 8192
    assert "--prefill.gather-chunk-tokens 8192" in found.flags


def test_layers_of_both_kinds_are_weighed():
    """A path that wins on the one full layer loses over the nine shared ones."""
    machine, cases = MACHINES[0], bench.grid((4096,), (512,))
    times = {("full", GATHERED): 1.0, ("full", OWNED): 3.0}
    times |= {("shared", GATHERED): 2.0, ("shared", OWNED): 1.0}
    records = []
    for (layer, path), seconds in times.items():
        (record,) = records_of(machine, cases, paths=(path,))
        timed = Times(seconds, seconds, seconds, 1)
        count = 1 if layer == "full" else 9
        records.append(replace(record, layer=layer, stands_for=count, times=timed))
    (found,) = bench.fit(records)
    (outcome,) = found.outcomes
    assert (outcome.default, outcome.default_seconds) == (GATHERED, 19)
    assert (outcome.best, outcome.best_seconds) == (OWNED, 12)


def test_later_records_replace_earlier_ones_and_wrong_outputs_do_not_count():
    machine, cases = MACHINES[0], bench.grid((4096,), (512,))
    records = records_of(machine, cases)
    slow = [replace(r, times=r.times and Times(9, 9, 9, 1)) for r in records if r.path is OWNED]
    (found,) = bench.fit(records + slow)
    assert found.outcomes[0].best is not OWNED
    wrong = Agreement(GATHERED, 1.0, 1.0, 0.0, 0, 0, 0, 0.0, 0, agrees=False)
    records = [replace(r, agreement=wrong) if r.path is SPLIT else r for r in records]
    (found,) = bench.fit(records)
    assert (cases[0], SPLIT) in found.missing


@pytest.mark.parametrize(("fastest", "changed"), [(0.9, True), (0.4, False)])
def test_a_gain_within_the_scatter_of_the_runs_is_no_evidence(fastest: float, changed: bool):
    """OWNED takes half of the default's median, but perhaps not of its fastest run."""
    machine, cases = MACHINES[0], bench.grid((4096,), (512,))
    records = []
    for path, median in ((GATHERED, 1.0), (OWNED, 0.5)):
        (record,) = records_of(machine, cases, paths=(path,))
        records.append(replace(record, times=Times(median, fastest * median, 2 * median, 9)))
    (found,) = bench.fit(records)
    assert (found.changes != ()) == changed


def test_setups_are_fitted_apart_and_parts_must_have_been_timed():
    cases = GRIDS["one-row"]
    records = records_of(MACHINES[0], cases) + records_of(MACHINES[1], cases)
    assert [f.setup.device for f in bench.fit(records)] == [MACHINES[0].id, MACHINES[1].id]
    with pytest.raises(ValueError, match="no record of the step part was timed with synthetic"):
        bench.fit(records, part="step")
