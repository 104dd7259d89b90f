"""Time of a decode step, part by part, and what follows from it.

With B requests of S tokens, n = B * next_n query tokens, L layers of which L_i have an indexer, and
n_r, B_r the share of a rank (all of them, but 1/N under attention data parallelism):

    weights       (fixed + hit experts) / hbm,   hit = E (1 - (1 - k/E)^n)
    sums          2 L alpha                                        (latency of the all-reduces)
    attention     L max(n_r k_own latent_row / hbm, 2 n_r k_own H_tile (2 C + R) / attention)
    index logits  L_i max(B_r S/W (index_row + 4 next_n) / hbm, 2 n_r S/W H_i D / fp8)
    top-k         L_i (topk_alpha + n_r S/W 4 / topk_bandwidth)
    exchange      alpha for every exchange + their bytes / link    (`plan.exchange`)
    merge         L_i (topk_alpha + n W pairs 4 / topk_bandwidth)  (of the candidates)
    fixed         L t_fix

H_tile is a rank's gathered heads in whole tiles of 64: DCP turns padded heads into useful ones.
k_own = min(K, S)/W * skew(W) rows, the expected maximum over the ranks. The bytes of all-reduces
are not counted: they are the same for every W.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from dcp_jax.config import ModelConfig
from dcp_jax.plan.devices import Device
from dcp_jax.plan.exchange import (
    candidates,
    collectives_per_step,
    layer_exchange,
    pair_bytes,
)
from dcp_jax.plan.memory import CacheBytes, Layout, q_replication_bytes, weight_bytes

LONGEST_CONTEXT = 2**26  # break-even contexts are searched up to here


@dataclass(frozen=True)
class Calibration:
    """Constants of the model that measurements set.

    Attributes:
        alpha: seconds of latency per exchange (5 us: one-shot over NVLink; NCCL takes 18).
        t_fix: further seconds per layer.
        topk_alpha: seconds of a top-k of few scores (8 us: fit to published radix kernels).
        topk_bandwidth: bytes per second at which it reads scores (1.2 to 2.4 TB/s published).
        head_tile: heads that an attention kernel computes together.
        pruned: candidates are pruned, else each rank sends K.
        bytes_per_pair: of a candidate; None: as few as its indices need.
    """

    alpha: float = 5e-6
    t_fix: float = 0.0
    topk_alpha: float = 8e-6
    topk_bandwidth: float = 2e12
    head_tile: int = 64
    pruned: bool = True
    bytes_per_pair: int | None = None


@dataclass(frozen=True)
class StepWeights:
    """Weight bytes that a rank reads in a step: always, and per expert hit in every layer."""

    fixed: int
    per_expert: float

    @classmethod
    def of(cls, cfg: ModelConfig, layout: Layout) -> "StepWeights":
        """All weights but the embedding table (a row per token) and the MTP layer's."""
        groups = weight_bytes(cfg, layout)
        experts = groups.pop("experts", 0)
        for unread in ("embedding", "mtp"):
            groups.pop(unread, None)
        return cls(sum(groups.values()), experts / cfg.n_routed_experts)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; `total` is the time per output token."""

    weights: float
    sums: float
    attention: float
    index_logits: float
    topk: float
    exchange_latency: float
    exchange_bytes: float
    merge: float
    fixed: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, f.name) for f in fields(self))


@lru_cache
def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` independent standard normal values."""
    step, largest = 0.01, 0.0
    for i in range(-800, 801):
        x = i * step
        density = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        below = (1 + math.erf(x / math.sqrt(2))) / 2
        largest += x * count * density * below ** (count - 1) * step
    return largest


def skew(index_topk: int, dcp_size: int) -> float:
    """Rows selected on the busiest rank over the mean: 1.012, 1.039, 1.083 at K=2048, W=2, 4, 8.

    1 + sigma/mean times the expected maximum, ranks taken as independent.
    """
    if dcp_size == 1:
        return 1.0
    return 1 + expected_maximum(dcp_size) * math.sqrt((dcp_size - 1) / index_topk)


def step_time(
    cfg: ModelConfig,
    layout: Layout,
    device: Device,
    requests: int,
    context: int,
    *,
    next_n: int = 1,
    calibration: Calibration | None = None,
    weights: StepWeights | None = None,
) -> StepTime:
    """Time of a decode step of `requests` rows whose caches hold `context` tokens.

    Args:
        cfg: the model.
        layout: how it lies on the devices.
        device: what they are.
        requests: rows.
        context: tokens of each.
        next_n: query tokens of each (1 and the drafts to verify).
        calibration: constants; default: the planning figures.
        weights: bytes read per step; default: those of the layout.
    """
    c, w = calibration or Calibration(), weights or StepWeights.of(cfg, layout)
    cache, ranks = CacheBytes.of(cfg, layout), layout.dcp_size
    layers, full, top = cfg.num_hidden_layers, len(cfg.full_layers), cfg.index_topk
    rows = -(-requests // layout.tp) if layout.attention_dp else requests
    tokens, queries = requests * next_n, rows * next_n
    experts, chosen = cfg.n_routed_experts, cfg.num_experts_per_tok
    hit = experts * (1 - (1 - chosen / experts) ** tokens)

    selected = min(top, context) / ranks * skew(top, ranks)
    tiles = -(-layout.heads(cfg) * ranks // c.head_tile) * c.head_tile
    width = 2 * cfg.kv_lora_rank + cfg.qk_rope_head_dim
    attention = max(
        queries * selected * cache.latent_row / device.hbm,
        2 * queries * selected * tiles * width / device.attention,
    )
    keys = context / (1 if layout.index_replicated else ranks)
    rate = device.fp8 if layout.kv_dtype == "fp8_e4m3" else device.bf16
    logits = max(
        rows * keys * (cache.index_row + 4 * next_n) / device.hbm,
        2 * queries * keys * cfg.index_n_heads * cfg.index_head_dim / rate,
    )
    topk = c.topk_alpha + queries * keys * 4 / c.topk_bandwidth

    received = merge = 0.0
    if ranks > 1:
        pairs = candidates(top, ranks, c.pruned)
        each = layer_exchange(
            cfg,
            layout,
            tokens,
            pairs=pairs,
            bytes_per_pair=c.bytes_per_pair or pair_bytes(-(-context // ranks)),
        )
        received = layers * (each.q + each.merge) + full * each.candidates
        if not layout.index_replicated:
            merge = full * (c.topk_alpha + tokens * ranks * pairs * 4 / c.topk_bandwidth)
    return StepTime(
        weights=(w.fixed + w.per_expert * hit) / device.hbm,
        sums=2 * layers * c.alpha if layout.tp > 1 else 0.0,
        attention=layers * attention,
        index_logits=full * logits,
        topk=full * topk,
        exchange_latency=c.alpha * collectives_per_step(cfg, layout),
        exchange_bytes=received / device.link,
        merge=merge,
        fixed=layers * c.t_fix,
    )


def break_even_context(
    cfg: ModelConfig,
    layout: Layout,
    device: Device,
    requests: int,
    calibration: Calibration | None = None,
) -> int | None:
    """The context from which on the layout's step is faster than dcp_size=1's.

    0 if it is so from index_topk tokens on, None if it never is.
    """
    plain = _without_dcp(layout)

    def faster(context: int) -> bool:
        times = (
            step_time(cfg, one, device, requests, context, calibration=calibration).total
            for one in (layout, plain)
        )
        return next(times) <= next(times)

    low, high = cfg.index_topk, LONGEST_CONTEXT
    if faster(low):
        return 0
    if not faster(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high


def break_even_tokens(
    cfg: ModelConfig, layout: Layout, device: Device, calibration: Calibration | None = None
) -> float:
    """Tokens in flight (B * S) beyond which DCP's latency pays.

    The law, (exchanges * alpha + L_full * t_merge) * hbm / (L_full (index_row + 4) (1 - 1/W)), sets
    the latency of the exchanges against the shorter scan of index keys and leaves out all else. A
    replicated index saves no scan: infinite.
    """
    if layout.index_replicated or layout.dcp_size == 1:
        return math.inf
    c, full = calibration or Calibration(), len(cfg.full_layers)
    cost = collectives_per_step(cfg, layout) * c.alpha + full * c.topk_alpha
    per_token = full * (CacheBytes.of(cfg, layout).index_row + 4)
    return cost * device.hbm / (per_token * (1 - 1 / layout.dcp_size))


def q_replication_seconds(cfg: ModelConfig, layout: Layout, device: Device) -> float:
    """Time per layer to read the weights that replicated queries need more."""
    return q_replication_bytes(cfg, layout) / device.hbm


def _without_dcp(layout: Layout) -> Layout:
    return replace(layout, dcp_size=1, index_replicated=False, replicate_q_proj=False)
