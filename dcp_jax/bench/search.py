"""The search for thresholds: policies judged by the paths that they choose. No jax."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise, product
from math import inf, sqrt
from typing import NamedTuple

from dcp_jax.bench.cases import Case
from dcp_jax.policy import Parallelism, PrefillPath, PrefillPolicy, choose_path

MIN_GAIN = 0.03  # below it, two times are the same: medians are known to 1 or 2 %
THRESHOLDS = (
    "dense_attn_kv_len_threshold",
    "split_indexer_min_kv",
    "owned_prefill_ratio",
    "gather_chunk_tokens",
)


class Seconds(NamedTuple):
    """Time of a path: median and fastest run."""

    median: float
    fastest: float


_NEVER = Seconds(inf, inf)

# By case, and by path with its chunk (None for paths that gather no selection).
Table = dict[Case, dict[tuple[PrefillPath, int | None], Seconds]]


class Judge:
    """Regret of policies over the cases that count; what was not timed costs infinitely much."""

    def __init__(self, table: Table, group: Parallelism, default: PrefillPolicy):
        self.table, self.group, self.default = table, group, default
        self._batches = {case: case.tokens for case in table}
        self._best = {
            case: min(t.median for t in times.values()) for case, times in table.items() if times
        }
        self._regrets: dict[PrefillPolicy, float] = {}  # a search asks for many of them twice

    def path(self, policy: PrefillPolicy, case: Case) -> PrefillPath:
        """The path that `policy` takes."""
        return choose_path(policy, self._batches[case], self.group)

    def time(self, policy: PrefillPolicy, case: Case) -> Seconds:
        """Time of that path; infinite if it was not timed."""
        path = self.path(policy, case)
        chunk = policy.gather_chunk_tokens if path.gathers else None
        return self.table[case].get((path, chunk), _NEVER)

    def regret(self, policy: PrefillPolicy) -> float:
        """Summed over the cases."""
        if policy not in self._regrets:
            times = ((self.time(policy, case).median, self._best[case]) for case in self.table)
            self._regrets[policy] = sum(median / best - 1 for median, best in times)
        return self._regrets[policy]

    def faster(self, policy: PrefillPolicy, than: PrefillPolicy) -> tuple[Case, ...]:
        """Cases that `policy` makes faster: by `MIN_GAIN`, and than any run of `than`'s path.

        Where `than` takes a path that was not timed, the default's path stands for it.
        """

        def gains(case: Case) -> bool:
            mine, other = self.time(policy, case).median, self._known(than, case)
            return mine < min((1 - MIN_GAIN) * other.median, other.fastest)

        return tuple(case for case in sorted(self.table) if gains(case))

    def saved(self, policy: PrefillPolicy, than: PrefillPolicy) -> float:
        """Regret of `than` less that of `policy`; see `faster` for what was not timed."""
        return sum(
            (self._known(than, case).median - self.time(policy, case).median) / self._best[case]
            for case in self.table
        )

    def _known(self, policy: PrefillPolicy, case: Case) -> Seconds:
        time = self.time(policy, case)
        return self.time(self.default, case) if time.median == inf else time


def fitted_policy(judge: Judge) -> PrefillPolicy:
    """The default with those thresholds changed that there is evidence to change.

    Every case of the table must have the time of the default's path.
    """
    values, default = quantities(judge), judge.default
    policy = _without_evidence(judge, _search(judge, values, default), default)
    return _centred(judge, values, policy, default)


def quantities(judge: Judge) -> dict[str, list]:
    """What each threshold is compared with, over the cases: distinct, ascending."""
    table, group = judge.table, judge.group
    batches = [case.tokens for case in table]
    ratios = {b.prefix_tokens / (group.gathered_heads * b.extend_tokens) for b in batches}
    return {
        "dense_attn_kv_len_threshold": sorted(
            {b.kv_len for b in batches if b.kv_len <= group.index_topk}
        ),
        "split_indexer_min_kv": sorted({b.mean_keys for b in batches}),
        "owned_prefill_ratio": sorted(ratios),
        "gather_chunk_tokens": sorted(
            {chunk for times in table.values() for _, chunk in times if chunk}
        ),
    }


def _between(name: str, low: float, high: float) -> float:
    """A threshold above `low` and below `high`, in the middle of their ratio."""
    middle = sqrt(low * high) if low > 0 else high / 2
    if name == "owned_prefill_ratio":
        rounded = float(f"{middle:.3g}")
        return rounded if low < rounded <= high else middle
    return max(int(middle), int(low) + 1) if name == "split_indexer_min_kv" else int(middle)


def _candidates(name: str, values: list, default: float) -> list[float]:
    """The default, a value between any two neighbours, and one below and one above all."""
    if name == "gather_chunk_tokens":
        return [default, *(v for v in values if v != default)]
    if not values:
        return [default]
    ends = [0, values[-1] if name == "dense_attn_kv_len_threshold" else _above(name, values)]
    inner = [_between(name, *pair) for pair in pairwise(values)]
    return [default, *dict.fromkeys([*inner, *ends])]


def _above(name: str, values: list) -> float:
    beyond = 2 * values[-1] or 1
    return float(f"{beyond:.3g}") if name == "owned_prefill_ratio" else int(beyond)


def _search(judge: Judge, values: dict[str, list], default: PrefillPolicy) -> PrefillPolicy:
    """The least regret; equal regret keeps the default.

    Dense attention decides before the two others, which depend on each other: those are searched
    together, then dense, in turns until nothing improves, from the default and from never dense.
    """
    options = {n: _candidates(n, values[n], getattr(default, n)) for n in THRESHOLDS}

    def better(policies: Iterable[PrefillPolicy]) -> PrefillPolicy:
        # `min` takes the first of equals, and the default stands first everywhere.
        return min(policies, key=lambda policy: round(judge.regret(policy), 9))

    def settled(policy: PrefillPolicy) -> PrefillPolicy:
        while True:
            pairs = product(options["owned_prefill_ratio"], options["split_indexer_min_kv"])
            after = better(
                replace(policy, owned_prefill_ratio=r, split_indexer_min_kv=s) for r, s in pairs
            )
            name = "dense_attn_kv_len_threshold"
            after = better(replace(after, **{name: value}) for value in options[name])
            if judge.regret(after) >= judge.regret(policy) - 1e-9:
                return policy if judge.regret(policy) <= judge.regret(after) else after
            policy = after

    starts = []
    for chunk in options["gather_chunk_tokens"]:
        start = replace(default, gather_chunk_tokens=chunk)
        starts += [start, replace(start, dense_attn_kv_len_threshold=0)]
    return better([default, *map(settled, starts)])


def _without_evidence(judge: Judge, policy: PrefillPolicy, default: PrefillPolicy) -> PrefillPolicy:
    """`policy` with its default for each threshold whose change makes no case faster."""
    again = True
    while again:
        again = False
        for name in THRESHOLDS:
            back = replace(policy, **{name: getattr(default, name)})
            if back == policy or judge.faster(policy, back) or judge.regret(back) == inf:
                continue
            policy, again = back, True
    return policy


def _centred(
    judge: Judge, values: dict[str, list], policy: PrefillPolicy, default: PrefillPolicy
) -> PrefillPolicy:
    """Changed thresholds in the middle of the range over which every case keeps its path."""
    for name in THRESHOLDS:
        value, known = getattr(policy, name), values[name]
        if name == "gather_chunk_tokens" or value in (0, getattr(default, name)):
            continue
        same = _same_paths(judge, policy, name)
        below = [v for v in known if v < value] or [0]
        above = [v for v in known if v >= value]
        if name == "dense_attn_kv_len_threshold":
            below, above = [v for v in known if v <= value] or [0], [v for v in known if v > value]
        while len(below) > 1 and same(_between(name, below[-2], below[-1])):
            below.pop()
        while len(above) > 1 and same(_between(name, above[0], above[1])):
            above.pop(0)
        if above and same(middle := _between(name, below[-1], above[0])):
            policy = replace(policy, **{name: middle})
    return policy


def _same_paths(judge: Judge, policy: PrefillPolicy, name: str) -> Callable[[float], bool]:
    now = [judge.path(policy, case) for case in judge.table]

    def same(value: float) -> bool:
        other = replace(policy, **{name: value})
        return [judge.path(other, case) for case in judge.table] == now

    return same
