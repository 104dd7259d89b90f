"""Tables and the plot of `dcp-jax plan` and `dcp-jax check-config`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from dcp_jax.plan import Calibration, Check, Comparison, Deployment, LayoutPlan, compare
from dcp_jax.plan.devices import GB

_TEXT = ("layout", "part", "stage", "exchange", "")  # columns of words
PLOT_CONTEXTS = tuple(2**i for i in range(13, 21))  # 8k to 1M tokens


def size(count: float) -> str:
    """Bytes, readable."""
    for unit, name in ((GB, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,.0f} B"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right")
    return table


def _break_even(row: LayoutPlan) -> str:
    if row.layout.dcp_size == 1:
        return "-"
    if row.break_even is None:
        return "never"
    return f"{row.break_even / 1e3:,.1f}k" if row.break_even else "always"


def comparison_table(plan: Comparison, max_requests: int) -> Table:
    """One row per layout."""
    table = _table(
        f"requests of {plan.context:,} tokens, at most {max_requests}",
        *("layout", "pool GB", "tokens", "requests", f"ms, B={plan.concurrency}"),
        *("tok/s, all", "break-even"),
    )
    for row in plan.rows:
        capacity = row.at_capacity
        table.add_row(
            row.name,
            f"{row.pool_bytes / GB:.1f}",
            f"{row.pool.tokens / 1e3:,.0f}k",
            str(row.requests),
            f"{row.step.total * 1e3:.2f}" if row.step else "x",
            f"{capacity.tokens_per_second:,.0f}" if capacity else "x",
            _break_even(row),
            style="bold" if _recommended(plan, row) else None,
        )
    table.caption = (
        f"tokens that fit; TPOT of B={plan.concurrency} requests (x: they do not fit); tokens/s "
        "with all requests that fit; context from which B requests are faster than with W=1"
    )
    return table


def _recommended(plan: Comparison, row: LayoutPlan) -> bool:
    return not row.layout.attention_dp and row.layout.dcp_size == plan.recommended


def verdicts(plan: Comparison) -> Iterator[str]:
    """What the comparison says, a sentence each."""
    limit = f" with TPOT <= {plan.limit * 1e3:g} ms" if plan.limit else ""
    chosen = next((row for row in plan.rows if _recommended(plan, row)), None)
    if chosen is None or chosen.best is None:
        yield f"No dcp_size decodes a request of {plan.context:,} tokens{limit} here."
    else:
        best = chosen.best
        yield (
            f"Recommended: dcp_size={plan.recommended}{limit}: {best.tokens_per_second:,.0f} "
            f"tokens/s with {best.requests} requests, TPOT {best.tpot * 1e3:.1f} ms."
        )
    other = plan.rows[-1]
    if other.layout.attention_dp:
        got = (
            f"{other.best.tokens_per_second:,.0f} tokens/s with {other.best.requests} requests"
            if other.best
            else "no request of this length fits on one rank, or none in time"
        )
        start = (
            f"; its step is the faster one from {plan.attention_dp_from} requests on"
            if plan.attention_dp_from
            else ""
        )
        wins = "wins" if plan.attention_dp_wins else "does not win"
        yield f"Attention data parallelism {wins} here: {got}{start}."
    for row in plan.rows:
        if row.law_tokens is not None:
            law = "saves no scan of index keys (replicated index)"
            if not row.layout.index_replicated:
                law = f"pays in latency from about {row.law_tokens:,.0f} tokens in flight on"
            more, seconds = row.q_replication
            yield (
                f"{row.name}: {law}; a replicated index costs {row.replication_cost:.1%} memory "
                f"per token, a replicated Q projection {size(more)} and "
                f"{seconds * 1e3:.2f} ms a step."
            )


def check_tables(found: Check) -> Iterator[Table]:
    """Layout, caches, memory, and exchanges of a deployment."""
    yield _layout_table(found)
    yield _memory_table(found)
    yield _workspace_table(found)
    if found.deployment.layout.tp > 1:
        yield _exchange_table(found)


def _layout_table(found: Check) -> Table:
    layout, pool, cache = found.deployment.layout, found.pool, found.cache_bytes
    table = _table(f"tp={layout.tp}, dcp_size={layout.dcp_size}", "layout", "")
    replicated = layout.index_replicated
    for name, value in (
        ("owner rule", found.owner_rule),
        ("page", f"{layout.page_size} rows a rank, {layout.page_tokens:,} tokens in all"),
        ("prefix reuse", f"in multiples of {found.prefix_granularity:,} tokens"),
        ("pages", f"{pool.pages:,}"),
        ("tokens per rank", f"{pool.rank_tokens:,}"),
        ("tokens in all", f"{pool.tokens:,}"),
        ("longest request", f"{found.max_model_len:,} tokens"),
        (
            f"latent KV ({layout.kv_dtype})",
            f"{cache.latent_row:,} B a token and layer, {cache.latent:,} B in {cache.layers} "
            "layers",
        ),
        (
            f"index K ({layout.kv_dtype})",
            f"{cache.index_row:,} B a token and layer, {cache.index:,} B in "
            f"{cache.index_layers} layers, {'whole on each rank' if replicated else 'sharded'}",
        ),
        (
            "per token and rank",
            f"{cache.rank_bytes(layout.dcp_size, replicated):,.1f} B",
        ),
        (
            "padding",
            ", ".join(f"{n} {real} -> {held}" for n, (real, held) in found.padding.items())
            or "none",
        ),
    ):
        table.add_row(name, value)
    return table


def _memory_table(found: Check) -> Table:
    on = found.deployment.device
    title = (
        "memory of a rank" if on is None else f"memory of a rank, {size(on.memory)} of {on.name}"
    )
    table = _table(title, "part", "bytes")
    for name, count in found.weights.items():
        table.add_row(f"weights: {name}", size(count))
    table.add_row("weights in all", size(sum(found.weights.values())), style="bold")
    for name, count in found.pool.rank_bytes.items():
        table.add_row(f"cache: {name}", size(count))
    table.add_row("caches in all", size(sum(found.pool.rank_bytes.values())), style="bold")
    table.add_row("reserve", size(found.deployment.reserve_bytes))
    for name, peak in found.peaks.items():
        step = found.steps[name]
        table.add_row(f"peak of a step: {name}, {step.rows} x {step.tokens} tokens", size(peak))
    if on is not None:
        rest = (1 - found.deployment.mem_fraction_static) * on.memory
        table.add_row("left for a step", size(rest), style="bold")
    return table


def _workspace_table(found: Check) -> Table:
    deployment, space = found.deployment, found.decode_workspace
    heads = deployment.layout.heads(deployment.cfg)
    table = _table(
        f"workspace of a decode step of {deployment.max_running_requests} requests "
        f"({heads} heads a rank, {heads * deployment.layout.dcp_size} gathered)",
        *("stage", "part", "bytes"),
    )
    for stage, parts in {"throughout": space.throughout, **space.stages}.items():
        for part, count in parts.items():
            table.add_row(stage, part, size(count))
    table.add_row("peak", f"in {space.peak_stage}", size(space.peak), style="bold")
    return table


def _exchange_table(found: Check) -> Table:
    steps = list(found.exchanged)
    table = _table("bytes that a rank receives in a step", "exchange", *steps)
    table.caption = (
        f"decode of {found.deployment.max_running_requests} requests, and the last chunk of a "
        f"prompt, at {found.max_model_len:,} tokens"
    )
    for kind in sorted({kind for received in found.exchanged.values() for kind in received}):
        sizes = (received.get(kind, 0) for received in found.exchanged.values())
        table.add_row(kind, *map(size, sizes))
    totals = (sum(received.values()) for received in found.exchanged.values())
    table.add_row("all", *map(size, totals), style="bold")
    return table


def plot_comparison(
    base: Deployment, plan: Comparison, calibration: Calibration, path: Path
) -> None:
    """Step time and throughput at capacity against the context, one line per layout.

    Raises:
        ValueError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"--plot {path} needs matplotlib, which is not installed: install dcp-jax with the "
            "'notebooks' extra, or leave --plot out."
        ) from None
    limit = base.cfg.max_position_embeddings
    roomy = replace(base, max_total_tokens=None)
    plans = [
        compare(
            roomy,
            context=context,
            concurrency=plan.concurrency,
            limit=plan.limit,
            calibration=calibration,
        )
        for context in PLOT_CONTEXTS
        if context <= limit
    ]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, row in enumerate(plan.rows):
        rows = [(p.context, p.rows[number]) for p in plans]
        timed = [(s, r.step.total * 1e3) for s, r in rows if r.step]
        fitting = [(s, r.at_capacity.tokens_per_second) for s, r in rows if r.at_capacity]
        for axes, points in ((left, timed), (right, fitting)):
            style = "--" if row.layout.attention_dp else "-"
            axes.plot(*(zip(*points, strict=True) if points else ([], [])), style, label=row.name)
    left.set_ylabel(f"TPOT of {plan.concurrency} requests that fit, ms")
    right.set_ylabel("tokens/s at KV capacity")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("context, tokens")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{base.layout.tp} x {plan.device.name}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"--plot {path} cannot be written ({error}): give another path.") from None
