"""A deployment, why it may not work, and the nearest settings that do.

pool = mem_fraction_static * memory - weights - reserve      for caches, per rank
rest = (1 - mem_fraction_static) * memory                    for the workspace of a step
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.engine.buckets import page_bucket, row_bucket, token_bucket
from dcp_jax.plan.devices import DEVICES, GB, Device
from dcp_jax.plan.exchange import StepShape
from dcp_jax.plan.memory import (
    Layout,
    Pool,
    largest_pool,
    most_pages,
    pool_of,
    weight_bytes,
)
from dcp_jax.plan.prefill import group_of, largest_prefills
from dcp_jax.plan.workspace import workspace
from dcp_jax.policy import PrefillPath, PrefillPolicy, ineligible

_KINDS = (
    *("size", "attention_dp", "path", "trained", "weights", "rows", "pool", "page", "request"),
    "step",
)
RESERVE = 6 * GB  # graphs, communication buffers, the runtime


@dataclass(frozen=True)
class Deployment:
    """A model on devices, with the engine's limits.

    Attributes:
        cfg: the model.
        layout: weights and caches.
        device: None: nothing is known of the memory, and `max_total_tokens` sizes the pool.
        mem_fraction_static: of a device's memory, for weights, pool and reserve; steps have the
            rest.
        reserve_bytes: neither weights nor pool: graphs, communication buffers, the runtime.
        max_model_len: tokens of a request; None: what the model allows and the pool holds.
        max_running_requests: decoded together.
        chunked_prefill_size: tokens of a prompt per step.
        prefill: which path a prefill step takes, and how much it gathers at a time.
        max_total_tokens: size of the pool over all ranks; None: what fits.
    """

    cfg: ModelConfig
    layout: Layout
    device: Device | None = None
    mem_fraction_static: float = 0.9
    reserve_bytes: int = RESERVE
    max_model_len: int | None = None
    max_running_requests: int = 64
    chunked_prefill_size: int = 8192
    prefill: PrefillPolicy = field(default_factory=PrefillPolicy)
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        optional = ("max_model_len", "max_total_tokens")
        counts = ("max_running_requests", "chunked_prefill_size")
        problems = [
            f"{name}={value!r} is not a count: give a whole number of at least 1"
            for name in (*optional, *counts)
            if ((value := getattr(self, name)) is not None or name in counts)
            and (type(value) is not int or value < 1)
        ]
        if not 0 < self.mem_fraction_static <= 1:
            problems.append(
                f"mem_fraction_static={self.mem_fraction_static} is no share of the memory: give "
                "a number above 0 and at most 1"
            )
        if self.reserve_bytes < 0:
            problems.append(f"reserve_bytes={self.reserve_bytes} is negative: give 0 or more")
        if problems:
            raise ValueError("; ".join(problems) + ".")

    @property
    def weights(self) -> int:
        """Bytes of weights on one rank."""
        return sum(weight_bytes(self.cfg, self.layout).values())

    @property
    def pool_budget(self) -> float:
        """Bytes that a rank has for caches."""
        if self.device is None:
            return float("inf")
        return self.mem_fraction_static * self.device.memory - self.weights - self.reserve_bytes

    @property
    def pool(self) -> Pool:
        """The caches: as many tokens as asked for, or as fit."""
        if self.max_total_tokens is not None:
            pages = pages_needed(self.max_total_tokens, self.layout.page_size, self.layout.dcp_size)
            return pool_of(self.cfg, self.layout, pages)
        return largest_pool(self.cfg, self.layout, self.pool_budget)

    def steps(self, context: int) -> dict[str, StepShape]:
        """The largest steps: decode, and one of each path that a prefill can take, at this context.

        Shapes are the runner's buckets; decode draws its tokens from whole logits.
        """
        rows = row_bucket(self.max_running_requests)
        shapes = {"decode": StepShape(rows, 1, self._table(context), sampled=True)}
        chunk = self.chunked_prefill_size
        group = group_of(self.cfg, self.layout)
        for path, batch in largest_prefills(self.prefill, group, context, chunk).items():
            # The dense path alone reads every key of the table, so it gets no more than it needs.
            dense = path is PrefillPath.MHA_ONE_SHOT
            shapes[f"prefill, {path.value}"] = StepShape(
                1,
                token_bucket(batch.extend_tokens, chunk),
                self._table(batch.kv_len if dense else context),
                path,
                gather_chunk_tokens=self.prefill.gather_chunk_tokens,
            )
        return shapes

    def _table(self, tokens: int) -> int:
        """Entries of the page table of a row with this many tokens."""
        size, ranks = self.layout.page_size, self.layout.dcp_size
        return page_bucket(pages_needed(tokens, size, ranks), size, ranks, self.pool.pages)


def request_tokens(wanted: Deployment) -> int:
    """Tokens of a request: as asked for, or what the model allows and the pool holds."""
    limit = wanted.cfg.max_position_embeddings
    return wanted.max_model_len or min(limit, wanted.pool.largest_request)


def problems(wanted: Deployment) -> Iterator[tuple[str, str]]:
    """Why the deployment cannot work: kinds of `_KINDS` with their texts.

    Without room for weights or for a page nothing further can be said.
    """
    cfg, layout, on = wanted.cfg, wanted.layout, wanted.device
    if wanted.max_total_tokens is None and on is None:
        yield (
            "size",
            "neither device nor max_total_tokens is given, so the pool cannot be sized: give "
            f"--device (one of {', '.join(DEVICES)}) or --max-total-tokens",
        )
        return
    if layout.attention_dp:
        yield (
            "attention_dp",
            "attention_dp is only compared with (`compare`), the engine does not have it: drop it",
        )
        return
    forced = wanted.prefill.force
    if forced is not None and (
        reason := ineligible(forced, wanted.prefill, 1, group_of(cfg, layout))
    ):
        yield "path", f"prefill.force={forced.value!r}: {reason}"
        return
    asked = wanted.max_model_len or 0
    if asked > cfg.max_position_embeddings:
        yield (
            "trained",
            f"max_model_len={asked} exceeds max_position_embeddings={cfg.max_position_embeddings}, "
            "beyond which the model was not trained",
        )
    setting = f"tp={layout.tp}, dcp_size={layout.dcp_size}"
    if on is not None and wanted.weights + wanted.reserve_bytes > (
        wanted.mem_fraction_static * on.memory
    ):
        yield (
            "weights",
            f"{wanted.weights / GB:.1f} GB of {layout.weights} weights per rank ({setting}) and "
            f"{wanted.reserve_bytes / GB:.1f} GB of reserve do not fit "
            f"mem_fraction_static={wanted.mem_fraction_static} of {on.name}'s "
            f"{on.memory / GB:.0f} GB",
        )
        return
    pool = wanted.pool
    if pool.pages > most_pages(cfg, layout):
        yield (
            "rows",
            f"max_total_tokens={wanted.max_total_tokens} is "
            f"{pool.rank_tokens} rows a rank, more than int32 can number over all layers",
        )
    needed = sum(pool.rank_bytes.values())
    if needed > wanted.pool_budget:
        yield (
            "pool",
            f"max_total_tokens={wanted.max_total_tokens} takes {needed / GB:.2f} GB per rank "
            f"({setting}, {layout.kv_dtype}) and {wanted.pool_budget / GB:.2f} GB are left",
        )
    elif pool.pages < 1:
        page = sum(pool_of(cfg, layout, 1).rank_bytes.values())
        left = f"{wanted.pool_budget / GB:.3f} GB"
        yield "page", f"{left} are left for caches on a rank and one page takes {page / GB:.3f} GB"
        return
    if asked > pool.largest_request:
        yield (
            "request",
            f"max_model_len={asked} does not fit the pool of {pool.largest_request} tokens "
            f"({setting}, {layout.kv_dtype})",
        )
    if on is None:
        return
    rest = (1 - wanted.mem_fraction_static) * on.memory
    for name, shape in wanted.steps(request_tokens(wanted)).items():
        peak = workspace(cfg, layout, shape).peak
        if peak > rest:
            yield (
                "step",
                f"a {name} step of {shape.rows} x {shape.tokens} tokens needs {peak / GB:.1f} GB "
                f"and mem_fraction_static={wanted.mem_fraction_static} leaves {rest / GB:.1f} GB",
            )


def fixes(wanted: Deployment) -> list[str]:
    """The nearest settings with which the deployment works: of each kind one, or a combination."""
    single = []
    for flag, tried in _changes(wanted).items():
        works = (value for value, other in tried if not any(problems(other)))
        single += [f"{flag} {value}" for value in itertools.islice(works, 1)]
    return single or _combination(wanted)


def _combination(wanted: Deployment) -> list[str]:
    """Settings that work together, where no single one does; none if that fails too."""
    settings: list[str] = []
    while any(left := _counts(wanted)):
        changes = [(flag, *one) for flag, tried in _changes(wanted).items() for one in tried]
        flag, value, other = min(changes, key=lambda change: _counts(change[2]))
        if _counts(other) >= left:
            return []
        settings.append(f"{flag} {value}")
        wanted = other
    return [" with ".join(settings)]


def _counts(wanted: Deployment) -> tuple[int, ...]:
    """Problems of each kind, the most basic first: a tuple that is less is nearer to working."""
    kinds = [kind for kind, _ in problems(wanted)]
    return tuple(kinds.count(kind) for kind in _KINDS)


def _changes(wanted: Deployment) -> dict[str, list[tuple[object, Deployment]]]:
    """Flag -> values to try, the nearest first."""
    layout, cfg = wanted.layout, wanted.cfg

    def with_layout(**fields) -> Deployment:
        return replace(wanted, layout=replace(layout, **fields))

    larger = [w for w in range(layout.dcp_size + 1, layout.tp + 1) if layout.tp % w == 0]
    tried: dict[str, list[tuple[object, Deployment]]] = {
        "--dcp-size": [(w, with_layout(dcp_size=w)) for w in larger if not layout.attention_dp],
        "--tp": [(layout.tp * m, with_layout(tp=layout.tp * m)) for m in (2, 4, 8, 16)],
        "--weights": [("fp8", with_layout(weights="fp8"))] if layout.weights != "fp8" else [],
        "--kv-cache-dtype": [("fp8_e4m3", with_layout(kv_dtype="fp8_e4m3"))]
        if layout.kv_dtype != "fp8_e4m3"
        else [],
        "--mem-fraction-static": [
            (f, replace(wanted, mem_fraction_static=f)) for f in _near(wanted.mem_fraction_static)
        ],
        "--chunked-prefill-size": [
            (size, replace(wanted, chunked_prefill_size=size))
            for size in _halves(wanted.chunked_prefill_size)
        ],
        "--max-running-requests": [
            (rows, replace(wanted, max_running_requests=rows))
            for rows in _halves(wanted.max_running_requests)
        ],
    }
    if wanted.max_total_tokens is not None:
        most = largest_pool(cfg, layout, wanted.pool_budget).tokens
        tried["--max-total-tokens"] = (
            [(most, replace(wanted, max_total_tokens=most))] if most else []
        )
        if wanted.max_model_len:
            need = pages_needed(wanted.max_model_len, layout.page_size, layout.dcp_size)
            need *= layout.page_tokens
            tried["--max-total-tokens"].insert(0, (need, replace(wanted, max_total_tokens=need)))
    if wanted.max_model_len:
        most = min(cfg.max_position_embeddings, wanted.pool.largest_request)
        tried["--max-model-len"] = [(most, replace(wanted, max_model_len=most))] if most else []
    return tried


def _near(fraction: float) -> list[float]:
    steps = [round(i / 20, 2) for i in range(10, 20)]
    return sorted((f for f in steps if f != fraction), key=lambda f: abs(f - fraction))


def _halves(size: int) -> list[int]:
    return [size >> i for i in range(1, 12) if size >> i >= 1]
