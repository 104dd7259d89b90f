"""Results and fitted thresholds as tables for the terminal."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from dcp_jax.bench.records import Record
from dcp_jax.bench.thresholds import Fit

SHOWN = 12  # cases that a note names


def result_tables(records: Iterable[Record]) -> list[Table]:
    """A table per part and kind of layer; paths of a case stand together, the best one in bold.

    `MB in` is what one rank receives, `MB temp` its temporary memory; `TFLOP/s` is the cost
    model's count over the measured time, of one rank; `TTFT ms` an estimate for all layers.
    `agrees` compares with the first path of the case, marked `=`. The default policy's path has
    a `*`.
    """
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault((record.setup, record.part, record.layer), []).append(record)
    tables = []
    for (setup, part, layer), mine in groups.items():
        kind = "whole step" if part == "step" else f"{part}, {layer} layer"
        counted = mine[0].stands_for
        title = f"{kind} ({counted} in the model)" if part != "step" else kind
        caption = f"{setup}; {mine[-1].date}"
        if mine[0].feed_forward not in ("none", "mixed"):
            caption += f"; {mine[0].feed_forward} feed-forward"
        tables.append(_results(title, caption, mine))
    return tables


def _results(title: str, caption: str, records: list[Record]) -> Table:
    part = records[0].part
    swept = len({r.gather_chunk_tokens for r in records if r.path.gathers}) > 1
    numbers = ["ms", "ratio", "MB in", "MB temp"]
    numbers += {"attention": ["TFLOP/s"], "layer": ["TTFT ms"], "step": []}[part]
    table = Table(title=title, caption=escape(caption), box=SIMPLE_HEAD, padding=0)
    table.add_column("case", no_wrap=True)
    table.add_column("path", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("agrees")
    for number, record in enumerate(records):
        path = record.path.value
        if swept and record.gather_chunk_tokens is not None:
            path += f" /{record.gather_chunk_tokens}"
        path += "*" if record.chosen else ""
        last = number + 1 == len(records) or records[number + 1].case != record.case
        if record.times is None or record.ratio is None:
            blank = ("-",) * len(numbers)
            table.add_row(str(record.case), path, *blank, "skipped", end_section=last)
            continue
        seconds, estimate = record.times.median, record.ttft_estimate
        cells = [
            _ms(seconds),
            f"{record.ratio:.2f}",
            f"{sum(record.received_bytes.values()) / 1e6:,.2f}",
            "-" if record.temp_bytes is None else f"{record.temp_bytes / 1e6:,.1f}",
        ]
        if part == "attention":
            cells.append(f"{sum(record.flops.values()) / seconds / 1e12:.3g}")
        if part == "layer":
            cells.append("-" if estimate is None else _ms(estimate))
        style = "bold" if record.ratio == 1 else None
        row = (str(record.case), path, *cells, _agreement(record))
        table.add_row(*row, style=style, end_section=last)
    return table


def _ms(seconds: float) -> str:
    """Milliseconds with three digits or more."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _agreement(record: Record) -> str:
    found = record.agreement
    if found is None:
        return "="
    notes = [] if found.agrees else [f"NO: {found.off:.1%} off, cosine {found.cosine:.4f}"]
    if found.unequal_sets:
        notes.append(f"{found.missed:.2%} of keys differ")
    if found.uncertified:
        notes.append(f"{found.uncertified} uncertified")
    return ", ".join(notes) or "yes"


def skip_notes(records: Iterable[Record]) -> list[str]:
    """One line per reason for which a path was not timed, with the cases."""
    cases: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.skipped is not None:
            named = cases.setdefault((record.path.value, record.skipped), [])
            if str(record.case) not in named:
                named.append(str(record.case))
    return [f"{path} skipped for {some(c)}: {reason}." for (path, reason), c in cases.items()]


def some(names: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def fit_tables(fit: Fit) -> list[Table]:
    """Where the default is wrong and by how much, and the thresholds that follow."""
    cases = Table(
        title=f"default policy against the best path, by {fit.part} time of all layers",
        box=SIMPLE_HEAD,
    )
    for name in ("case", "default", "best"):
        cases.add_column(name, no_wrap=True)
    for name in ("best ms", "default loses", "fitted loses"):
        cases.add_column(name, justify="right")
    for o in fit.outcomes:
        losses = (f"{regret:.0%}" for regret in (o.default_regret, o.fitted_regret))
        best = _ms(o.best_seconds)
        cases.add_row(str(o.case), o.default.value, o.best.value, best, *losses)
    thresholds = Table(title="thresholds", caption=escape(str(fit.setup)), box=SIMPLE_HEAD)
    thresholds.add_column("threshold")
    for name in ("default", "fitted", "cases faster", "regret saved"):
        thresholds.add_column(name, justify="right")
    for change in fit.changes:
        thresholds.add_row(
            change.name,
            f"{change.default}",
            f"{change.value}" + (" (edge)" if change.edge else ""),
            str(len(change.cases)),
            f"{change.regret_saved:.2f}",
        )
    return [cases, thresholds] if fit.changes else [cases]


def fit_notes(fit: Fit) -> list[str]:
    """What the tables mean, in sentences: gain, flags, and what cannot be said."""
    notes = []
    if not fit.outcomes:
        notes.append("No case has the time of the default's path: nothing can be said.")
    else:
        default, fitted, best = fit.seconds
        worst, after = fit.worst_regret
        notes.append(
            f"{len(fit.outcomes)} cases: the default policy takes {_ms(default)} ms in all, the "
            f"fitted one {_ms(fitted)}, the best paths {_ms(best)}; at worst the default loses "
            f"{worst:.0%}, the fitted one {after:.0%}."
        )
        notes.append(
            f"For this machine: {fit.flags}"
            if fit.changes
            else "The records give no evidence for thresholds other than the defaults."
        )
    for change in fit.changes:
        if change.edge:
            notes.append(
                f"{change.name}: the crossover lies beyond the timed cases; time some further out."
            )
    if fit.no_claim:
        notes.append(
            "The default's own path was not timed, so nothing is claimed, for "
            f"{some([str(case) for case in fit.no_claim])}."
        )
    missing: dict[str, list[str]] = {}
    for case, path in fit.missing:
        missing.setdefault(path.value, []).append(str(case))
    notes += [f"Not timed: {path} for {some(names)}." for path, names in missing.items()]
    return notes
