"""What a deployment holds and how fast it decodes, before anything runs: no array, no jax.

`check` (in `plan.check`) answers for one deployment. `compare` sets W = 1, 2, 4, 8 and attention
data parallelism side by side:

    pool(W)       = mem_fraction_static * memory - weights(W) - reserve     per rank
    tokens(W)     = floor over whole pages of pool(W) / rank_bytes(W)       (`plan.memory`)
    requests(W)   = tokens(W) / context, at most max_running_requests
    TPOT(W, B, S) = the parts of a decode step                              (`plan.step`)
    throughput(W) = requests(W) / TPOT(W, requests(W), context)
    recommended W = argmax over W of the best B / TPOT(W, B, context) with TPOT <= limit

Rates are what kernels and links allow, not promises; `Calibration` takes measured constants. Under
attention data parallelism each rank holds its own requests' whole caches and the whole attention,
so nothing is exchanged in attention and no head is wasted, but a rank has less room, one request
must fit on one rank, and a step with few requests leaves ranks idle: it wins at high concurrency.
"""

from dataclasses import dataclass, replace
from typing import Any

from dcp_jax.plan.check import Check, check
from dcp_jax.plan.devices import DEVICES, Device, device
from dcp_jax.plan.exchange import (
    LayerExchange,
    StepShape,
    candidates,
    collectives_per_step,
    exchange_bytes,
    layer_exchange,
)
from dcp_jax.plan.limits import RESERVE, Deployment
from dcp_jax.plan.memory import (
    CacheBytes,
    Layout,
    Pool,
    largest_pool,
    parameters,
    pool_of,
    q_replication_bytes,
    weight_bytes,
)
from dcp_jax.plan.step import (
    Calibration,
    StepTime,
    StepWeights,
    break_even_context,
    break_even_tokens,
    q_replication_seconds,
    skew,
    step_time,
)
from dcp_jax.plan.workspace import Workspace, workspace

__all__ = [
    "DEVICES",
    "RESERVE",
    "CacheBytes",
    "Calibration",
    "Check",
    "Comparison",
    "Deployment",
    "Device",
    "LayerExchange",
    "Layout",
    "LayoutPlan",
    "Pool",
    "Rate",
    "StepShape",
    "StepTime",
    "StepWeights",
    "Workspace",
    "break_even_context",
    "break_even_tokens",
    "candidates",
    "check",
    "collectives_per_step",
    "compare",
    "device",
    "exchange_bytes",
    "largest_pool",
    "layer_exchange",
    "parameters",
    "pool_of",
    "q_replication_bytes",
    "q_replication_seconds",
    "skew",
    "step_time",
    "weight_bytes",
    "workspace",
]

DCP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Rate:
    """A number of requests decoded together, seconds per output token, tokens per second in all."""

    requests: int
    tpot: float
    tokens_per_second: float


@dataclass(frozen=True)
class LayoutPlan:
    """One row of the comparison.

    Attributes:
        name: "W=4", or "attn DP".
        layout: the layout.
        weights: bytes on one rank.
        pool_bytes: for caches on one rank; negative if not even the weights fit.
        pool: the caches that fit.
        requests: of the context that fit, at most max_running_requests.
        step: of `concurrency` requests; None if they do not fit.
        at_capacity: with all requests that fit; None if none does.
        best: the best throughput within the limit; None if no number of requests meets it.
        break_even: context from which on `concurrency` requests decode faster than with W=1; 0:
            always, None: never (or no DCP).
        law_tokens: tokens in flight beyond which DCP's latency pays, by the law; None: no DCP.
        replication_cost: memory of a replicated index over a sharded one, less 1.
        q_replication: bytes per rank, and seconds per step, to replicate the Q projection.
    """

    name: str
    layout: Layout
    weights: int
    pool_bytes: float
    pool: Pool
    requests: int
    step: StepTime | None
    at_capacity: Rate | None
    best: Rate | None
    break_even: int | None
    law_tokens: float | None
    replication_cost: float
    q_replication: tuple[int, float]


@dataclass(frozen=True)
class Comparison:
    """Layouts of one model on the same devices.

    Attributes:
        device: what they are.
        context: tokens of each request.
        concurrency: requests of the `step` column.
        limit: seconds per output token at most, or None.
        rows: one per layout; the last is attention data parallelism if tp > 1.
        recommended: the dcp_size with the best throughput within the limit; None: none meets it.
        attention_dp_wins: attention data parallelism beats it there.
        attention_dp_from: the least concurrency at which its step is faster than the recommended
            W's, whatever fits; None: at none up to max_running_requests.
    """

    device: Device
    context: int
    concurrency: int
    limit: float | None
    rows: tuple[LayoutPlan, ...]
    recommended: int | None
    attention_dp_wins: bool
    attention_dp_from: int | None


def compare(
    base: Deployment,
    *,
    context: int,
    concurrency: int,
    limit: float | None = None,
    calibration: Calibration | None = None,
) -> Comparison:
    """Compare dcp_size 1, 2, 4, 8 (those that divide tp) and attention data parallelism.

    Args:
        base: model, device, and everything of the layout but dcp_size.
        context: tokens of each request.
        concurrency: requests whose step is timed.
        limit: most seconds per output token.
        calibration: constants of the step model.

    Raises:
        ValueError: no device, a size that is not one, or weights that fit with no layout.
    """
    for name, value in (("context", context), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"{name}={value} is not a count: give a whole number of at least 1.")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit={limit} is no time: give seconds above 0, or None.")
    if context > base.cfg.max_position_embeddings:
        raise ValueError(
            f"context={context} exceeds the model's max_position_embeddings="
            f"{base.cfg.max_position_embeddings}: give at most that."
        )
    if base.device is None:
        raise ValueError(f"no device to plan for: give one of {', '.join(DEVICES)}.")
    c = calibration or Calibration()

    def row(name: str, **changes: Any) -> LayoutPlan:
        deployment = replace(base, layout=replace(base.layout, **changes))
        return _row(name, deployment, context, concurrency, limit, c)

    plain = {"index_replicated": False, "replicate_q_proj": False}
    rows = [
        row(f"W={w}", dcp_size=w, **(plain if w == 1 else {}))
        for w in DCP_SIZES
        if base.layout.tp % w == 0
    ]
    if rows[0].pool.pages < 1:  # refused, with the settings that do fit
        check(replace(base, layout=rows[0].layout, max_model_len=None))
    best = max((r for r in rows if r.best), key=_rate, default=None)
    if base.layout.tp > 1:
        rows.append(row("attn DP", dcp_size=1, attention_dp=True, **plain))
    return Comparison(
        device=base.device,
        context=context,
        concurrency=concurrency,
        limit=limit,
        rows=tuple(rows),
        recommended=best.layout.dcp_size if best else None,
        attention_dp_wins=rows[-1].layout.attention_dp
        and rows[-1].best is not None
        and (best is None or _rate(rows[-1]) > _rate(best)),
        attention_dp_from=_overtakes(base, best, rows[-1], context, c),
    )


def _rate(row: LayoutPlan) -> float:
    return row.best.tokens_per_second if row.best else 0.0


def _row(name, on: Deployment, context, concurrency, limit, c: Calibration) -> LayoutPlan:
    cfg, layout, dev = on.cfg, on.layout, on.device
    assert dev is not None, "compare() refuses a deployment without a device"
    pool = on.pool
    requests = min(on.max_running_requests, pool.requests(context) if pool.pages else 0)

    def step(rows: int) -> StepTime:
        return step_time(cfg, layout, dev, rows, context, calibration=c)

    rates = [Rate(b, t, b / t) for b in range(1, requests + 1) if (t := step(b).total)]
    allowed = [rate for rate in rates if limit is None or rate.tpot <= limit]
    dcp = layout.dcp_size > 1
    return LayoutPlan(
        name=name,
        layout=layout,
        weights=on.weights,
        pool_bytes=on.pool_budget,
        pool=pool,
        requests=requests,
        step=step(concurrency) if concurrency <= requests else None,
        at_capacity=rates[-1] if rates else None,
        best=max(allowed, key=lambda rate: rate.tokens_per_second, default=None),
        break_even=break_even_context(cfg, layout, dev, concurrency, c) if dcp else None,
        law_tokens=break_even_tokens(cfg, layout, dev, c) if dcp else None,
        replication_cost=CacheBytes.of(cfg, layout).replication_cost(layout.dcp_size),
        q_replication=(
            cfg.num_hidden_layers * q_replication_bytes(cfg, layout),
            cfg.num_hidden_layers * q_replication_seconds(cfg, layout, dev),
        ),
    )


def _overtakes(base: Deployment, best, dp, context: int, c: Calibration) -> int | None:
    """The least concurrency at which a step of `dp` is faster than one of `best`."""
    if best is None or not dp.layout.attention_dp or base.device is None:
        return None
    for rows in range(1, base.max_running_requests + 1):
        times = [
            step_time(base.cfg, row.layout, base.device, rows, context, calibration=c).total
            for row in (dp, best)
        ]
        if times[0] < times[1]:
            return rows
    return None
