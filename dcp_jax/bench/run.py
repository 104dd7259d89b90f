"""`prefill`: time the paths of every case on the same inputs, case by case."""

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from dcp_jax.bench import cost
from dcp_jax.bench.cases import Case
from dcp_jax.bench.measure import agreement, near_ties, sample_of, selected_sets, time_runs
from dcp_jax.bench.memory import GIB, free_bytes
from dcp_jax.bench.options import PrefillOptions, TimedLayer
from dcp_jax.bench.programs import Program
from dcp_jax.bench.records import Agreement, Record, Times
from dcp_jax.bench.subject import Inputs, Subject, Variant
from dcp_jax.layers.indexer import Selection
from dcp_jax.policy import PrefillPath, choose_path, ineligible

DENSE = PrefillPath.MHA_ONE_SHOT
WARM_UP = 2  # runs before the timed ones; the output of the first is compared

# Selections of a case's full layers by part and variant: its shared layers take theirs.
Selections = dict[tuple[str, Variant], Selection | None]


def prefill(options: PrefillOptions) -> Iterator[Record]:
    """Time every case; its records come when all of its parts are done.

    Compiling is ahead of time and never timed. Paths run in turns, on the same inputs and the same
    caches, each run waiting for its result.

    Raises:
        ValueError: what cannot run here, before weights or caches are made.
    """
    subject = Subject(options)
    layers = options.timed_layers()
    parts = [(part, t) for part in options.parts for t in (layers if part != "step" else (None,))]
    total = len(options.cases) * len(parts)
    with tqdm(total=total, disable=not options.progress, unit="part") as bar:
        for case in options.cases:
            found: list[Record] = []
            selections: Selections = {}
            for part, timed in parts:
                bar.set_description(f"{case} {part}" + (f", {timed.kind} layer" if timed else ""))
                found += _time_part(subject, case, part, timed, selections)
                bar.update()
            yield from _with_estimates(found)


def _time_part(
    subject: Subject, case: Case, part: str, timed: TimedLayer | None, selections: Selections
) -> list[Record]:
    """Records of one part of a case (`timed` is None for a step), skipped paths included."""
    options, inputs = subject.options, subject.inputs(case)
    records = []
    programs: dict[Variant, Program] = {}
    runs: dict[Variant, Callable[[], Any]] = {}
    for variant in options.variants():
        path = variant[0]
        skipped = ineligible(path, options.policy, case.keys, subject.group)
        selection = selections.get((part, variant))
        needs_one = timed is not None and timed.kind == "shared" and path is not DENSE
        if skipped is None and needs_one and selection is None:
            skipped = "the full layer whose selection it reuses was not timed"
        if skipped is None:
            program = subject.program(case, part, timed, variant, inputs, selection)
            skipped = _no_room(program, free_bytes(subject.model.mesh))
            if skipped is None:
                programs[variant] = program
                runs[variant] = subject.runner(program, timed, inputs, selection)
        records.append(_record(subject, case, part, timed, variant, skipped))
    if not runs:
        return records
    agreements = _compare(subject, runs, case, part, timed, inputs, selections)
    for run in [run for _ in range(WARM_UP - 1) for run in runs.values()]:
        run()
    times = time_runs(runs, options.repeats)
    best = min(t.median for t in times.values())
    return [
        _measured(subject, record, programs[v], times[v], agreements.get(v), best)
        if (v := record.variant) in times
        else record
        for record in records
    ]


def _no_room(program: Program, free: int | None) -> str | None:
    """Why a program would run out of memory, which would lose the caches; None if it fits."""
    if free is None or program.temp_bytes is None or program.temp_bytes <= free:
        return None
    return (
        f"it needs {program.temp_bytes / GIB:.1f} GiB of temporary memory and {free / GIB:.1f} are "
        "free: time fewer tokens at once"
    )


def _compare(
    subject: Subject,
    runs: Mapping[Variant, Callable[[], Any]],
    case: Case,
    part: str,
    timed: TimedLayer | None,
    inputs: Inputs,
    selections: Selections,
) -> dict[Variant, Agreement]:
    """Run each program once and compare its output with the first one's.

    Selected sets are compared in the attention part of a full layer, with those of the first path
    that selects.
    """
    batch, exact = inputs[0], subject.model.dtype == jnp.float32
    valid = np.arange(batch.tokens.shape[1]) < np.asarray(batch.lengths)[:, None]
    sampled = sample_of(case.extend)
    first: tuple[Variant, Any] | None = None
    first_sets: list[np.ndarray] | None = None
    ties = None
    found: dict[Variant, Agreement] = {}
    for variant, run in runs.items():
        out = run()
        y, selection = (out.hidden, None) if timed is None else out
        sets = uncertified = None
        if timed is not None and timed.kind == "full" and selection is not None:
            selections[part, variant] = selection
            uncertified = int((~np.asarray(selection.certified[0]) & valid).sum())
            if part == "attention":
                own = selected_sets(selection, variant[0], sampled, case.batch)
                sets = None if first_sets is None else (own, first_sets)
                first_sets = first_sets or own
                if exact and ties is None:
                    scores = subject.scores(timed, inputs, sampled)[: case.batch]
                    visible = np.tile(case.prefix + sampled + 1, case.batch)
                    flat = scores.reshape(len(visible), -1)
                    ties = near_ties(flat, visible, subject.cfg.index_topk)
        if first is None:
            first = variant, y
            continue
        found[variant] = agreement(
            y,
            first[1],
            first[0][0],
            valid,
            exact=exact,
            sets=sets,
            ties=ties,
            uncertified=uncertified or 0,
        )
    return found


def _record(
    subject: Subject,
    case: Case,
    part: str,
    timed: TimedLayer | None,
    variant: Variant,
    skipped: str | None,
) -> Record:
    """A record without measurements."""
    kinds = set(subject.cfg.mlp_layer_types)
    if timed is None:
        feed_forward = kinds.pop() if len(kinds) == 1 else "mixed"
    elif part == "layer":
        feed_forward = "sparse" if timed.sparse else "dense"
    else:
        feed_forward = "none"
    policy = replace(subject.options.policy, force=None)
    return Record(
        setup=subject.setup,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        case=case,
        shape=subject.shape(case),
        part=part,  # type: ignore[arg-type]
        layer=timed.kind if timed else "all",
        stands_for=timed.stands_for if timed else 1,
        feed_forward=feed_forward,  # type: ignore[arg-type]
        path=variant[0],
        gather_chunk_tokens=variant[1],
        chosen=choose_path(policy, case.tokens, subject.group) is variant[0],
        skipped=skipped,
    )


def _measured(
    subject: Subject,
    record: Record,
    program: Program,
    times: Times,
    agrees: Agreement | None,
    best: float,
) -> Record:
    spent = {}
    if record.layer != "all":
        spent = cost.flops(
            subject.cfg,
            record.case,
            record.path,
            tp=subject.options.tp,
            heads=subject.group.gathered_heads // subject.options.dcp_size,
            dcp_size=subject.options.dcp_size,
            full=record.layer == "full",
            feed_forward=record.feed_forward,
        )
    return replace(
        record,
        times=times,
        ratio=times.median / best,
        agreement=agrees,
        received_bytes=program.received_bytes,
        flops=spent,
        temp_bytes=program.temp_bytes,
    )


def _with_estimates(records: list[Record]) -> list[Record]:
    """Records of one case, with the time that all layers of the model take by each path."""
    totals: dict[Variant, float] = {}
    for record in records:
        if record.part == "layer" and record.times:
            before = totals.get(record.variant, 0.0)
            totals[record.variant] = before + record.stands_for * record.times.median
    return [replace(record, ttft_estimate=totals.get(record.variant)) for record in records]
