"""Thresholds for this machine from its records, and what they gain over the defaults. No jax.

A policy is judged by asking `policy.choose_path` for every timed case and adding up its regret:
time of the chosen path over that of the best path, less 1, so that each case counts alike. Only
what was timed speaks: a case whose default path was not timed makes no claim, and no policy is
considered that takes a path which was not timed. A threshold differs from its default only if that
makes some case faster: by `MIN_GAIN`, and than the fastest run of the path taken otherwise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from dcp_jax.bench.cases import PARTS, Case
from dcp_jax.bench.records import Record, Setup
from dcp_jax.bench.search import THRESHOLDS, Judge, Seconds, Table, fitted_policy, quantities
from dcp_jax.policy import PrefillPath, PrefillPolicy, ineligible


@dataclass(frozen=True)
class Outcome:
    """A case under the default and the fitted policy; seconds of the part over all its layers.

    Attributes:
        case: the batch.
        default: path of the default policy; fitted: of the fitted one; best: the fastest timed.
        default_seconds: their times.
        fitted_seconds: as above.
        best_seconds: as above.
    """

    case: Case
    default: PrefillPath
    fitted: PrefillPath
    best: PrefillPath
    default_seconds: float
    fitted_seconds: float
    best_seconds: float

    @property
    def default_regret(self) -> float:
        """How much longer the default takes than the best path: 0.2 is 20 %."""
        return self.default_seconds / self.best_seconds - 1

    @property
    def fitted_regret(self) -> float:
        """The same of the fitted policy."""
        return self.fitted_seconds / self.best_seconds - 1


@dataclass(frozen=True)
class Change:
    """A threshold that differs from its default.

    Attributes:
        name: field of `PrefillPolicy`.
        default: its default.
        value: its fitted value.
        regret_saved: regret, summed over cases, that comes back with the default of this one.
        cases: those that it makes faster.
        edge: the value lies outside of the timed cases; the crossover may lie further still.
    """

    name: str
    default: float
    value: float
    regret_saved: float
    cases: tuple[Case, ...]
    edge: bool

    @property
    def flag(self) -> str:
        """Ready for the command line."""
        return f"--prefill.{self.name.replace('_', '-')} {self.value}"


@dataclass(frozen=True)
class Fit:
    """Thresholds for one setup.

    Attributes:
        setup: machine, model and options.
        part: whose times were used.
        default: the policy compared with.
        policy: the default with all changes.
        changes: thresholds with evidence for another value.
        outcomes: every case that counts.
        no_claim: cases whose default path was not timed.
        missing: eligible paths that were not timed, by case.
    """

    setup: Setup
    part: str
    default: PrefillPolicy
    policy: PrefillPolicy
    changes: tuple[Change, ...]
    outcomes: tuple[Outcome, ...]
    no_claim: tuple[Case, ...]
    missing: tuple[tuple[Case, PrefillPath], ...]

    @property
    def flags(self) -> str:
        """Options of the command line that set the changes; empty if there are none."""
        return " ".join(change.flag for change in self.changes)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Sum over the cases: of the default policy, the fitted one, the best paths."""
        return (
            sum(o.default_seconds for o in self.outcomes),
            sum(o.fitted_seconds for o in self.outcomes),
            sum(o.best_seconds for o in self.outcomes),
        )

    @property
    def worst_regret(self) -> tuple[float, float]:
        """Of the default policy, and of the fitted one."""
        return (
            max((o.default_regret for o in self.outcomes), default=0.0),
            max((o.fitted_regret for o in self.outcomes), default=0.0),
        )


def fit(
    records: Iterable[Record], default: PrefillPolicy | None = None, part: str | None = None
) -> list[Fit]:
    """Fit the thresholds of every setup in `records`.

    Args:
        records: of `prefill`; of two with the same case, part and path the later one counts. One
            whose output did not agree does not count.
        default: the policy to compare with.
        part: whose times to use; None: attention if it was timed, else layer, else step. The paths
            differ in attention only, and its time has the least of what they share.

    Raises:
        ValueError: no record was timed, or none of `part`.
    """
    default = replace(default or PrefillPolicy(), force=None)
    by_setup: dict[Setup, list[Record]] = {}
    for record in records:
        by_setup.setdefault(record.setup, []).append(record)
    found = []
    for setup, mine in by_setup.items():
        parts = [p for p in PARTS if any(r.part == p and r.times for r in mine)]
        chosen = part or (parts[0] if parts else None)
        if chosen not in parts:
            raise ValueError(
                f"no record of the {chosen or 'bench'} part was timed with {setup}: time some with "
                "bench prefill, or fit another part."
            )
        table = times_by_case([r for r in mine if r.part == chosen])
        cases = sorted({r.case for r in mine})
        found.append(_fit_one(setup, chosen, table, cases, default))
    return found


def times_by_case(records: Iterable[Record]) -> Table:
    """Seconds of one part over all layers of the model, by case and variant.

    Layers of both kinds are added up, each median times the layers that it stands for; a variant
    of which a kind was not timed is left out.
    """
    latest = {
        (r.case, r.variant, r.layer): r
        for r in records
        if r.times and (r.agreement is None or r.agreement.agrees)
    }
    kinds = {layer for _, _, layer in latest}
    table: Table = {}
    for case, variant in {key[:2] for key in latest}:
        timed = [latest.get((case, variant, kind)) for kind in kinds]
        if all(timed):
            runs = [(r.stands_for, r.times) for r in timed if r and r.times]
            table.setdefault(case, {})[variant] = Seconds(
                sum(count * times.median for count, times in runs),
                sum(count * times.fastest for count, times in runs),
            )
    return table


def _fit_one(
    setup: Setup,
    part: str,
    table: Table,
    cases: Sequence[Case],
    default: PrefillPolicy,
) -> Fit:
    group = setup.group
    everything = Judge({case: table.get(case, {}) for case in cases}, group, default)
    counted = {c: table[c] for c in cases if everything.time(default, c).median < inf}
    judge = Judge(counted, group, default)
    policy = fitted_policy(judge)
    timed = {case: {path for path, _ in table.get(case, {})} for case in cases}
    return Fit(
        setup=setup,
        part=part,
        default=default,
        policy=policy,
        changes=tuple(_changes(judge, policy, default)),
        outcomes=tuple(_outcome(judge, case, default, policy) for case in sorted(counted)),
        no_claim=tuple(case for case in cases if case not in counted),
        missing=tuple(
            (case, path)
            for case in cases
            for path in PrefillPath
            if path not in timed[case] and not ineligible(path, default, case.keys, group)
        ),
    )


def _changes(judge: Judge, policy: PrefillPolicy, default: PrefillPolicy) -> Iterable[Change]:
    values = quantities(judge)
    for name in THRESHOLDS:
        value, usual = getattr(policy, name), getattr(default, name)
        if value == usual:
            continue
        back, known = replace(policy, **{name: usual}), values[name]
        dense = name == "dense_attn_kv_len_threshold"
        edge = name != "gather_chunk_tokens" and (
            value < known[0] or (not dense and value > known[-1])
        )
        yield Change(
            name,
            usual,
            value,
            judge.saved(policy, back),
            judge.faster(policy, back),
            edge,
        )


def _outcome(judge: Judge, case: Case, default: PrefillPolicy, fitted: PrefillPolicy) -> Outcome:
    times = judge.table[case]
    best = min(times, key=lambda variant: times[variant].median)
    return Outcome(
        case,
        judge.path(default, case),
        judge.path(fitted, case),
        best[0],
        judge.time(default, case).median,
        judge.time(fitted, case).median,
        times[best].median,
    )
