"""`plan` against published figures: capacity, exchange bytes, step times, break-even context."""

import math
from dataclasses import dataclass, replace

import pytest

from dcp_jax.config import ModelConfig
from dcp_jax.configs import NAMES, named_config
from dcp_jax.plan import (
    CacheBytes,
    Calibration,
    Deployment,
    Layout,
    StepWeights,
    break_even_context,
    break_even_tokens,
    collectives_per_step,
    compare,
    device,
    largest_pool,
    layer_exchange,
    parameters,
    q_replication_bytes,
    q_replication_seconds,
    skew,
    step_time,
    weight_bytes,
)

CONFIGS = {name: ModelConfig.from_hf(named_config(name)) for name in NAMES}
V32, GLM5, GLM52 = (CONFIGS[name] for name in NAMES)
DCP_SIZES = (1, 2, 4, 8)
CONTEXTS = (8192, 32768, 131072, 1048576)
REQUESTS = (1, 8, 32, 128)
# The published tables send unpruned pairs of 8 bytes, and leave out the router's weights.
PUBLISHED = Calibration(pruned=False, bytes_per_pair=8)


def layout(dcp_size=1, tp=8, **changes) -> Layout:
    fp8 = Layout(tp=tp, dcp_size=dcp_size, weights="fp8", kv_dtype="fp8_e4m3")
    return replace(fp8, **changes)


def without_router(cfg: ModelConfig, on: Layout) -> StepWeights:
    weights = StepWeights.of(cfg, on)
    return replace(weights, fixed=weights.fixed - weight_bytes(cfg, on)["router"])


def published_weights(cfg: ModelConfig, tp: int = 8) -> float:
    """Bytes per rank as the capacity table counts them: all but the indexer spread over tp."""
    total = 0.0
    for weight in parameters(cfg, layout(tp=tp)):
        if weight.group not in ("router", "norms"):
            item = 2 if weight.group in ("embedding", "head") else 1
            spread = 1 if weight.group == "indexer" else tp
            total += item * math.prod(weight.shape) / spread
    return total


def published_pool(cfg: ModelConfig, on: str) -> float:
    return 0.9 * device(on).memory - published_weights(cfg) - 6e9


def test_released_configs():
    assert [len(cfg.full_layers) for cfg in CONFIGS.values()] == [61, 78, 21]
    assert GLM52.full_layers[:5] == (0, 1, 2, 6, 10)
    assert round(V32.softmax_scale, 6) == 0.135234
    assert GLM5.softmax_scale == 1 / 16
    assert all(cfg.num_nextn_predict_layers == 1 for cfg in CONFIGS.values())
    with pytest.raises(ValueError, match=r"'glm-4'.*deepseek-v3\.2, glm-5, glm-5\.2"):
        named_config("glm-4")


def test_bytes_per_token():
    per_tensor = CacheBytes(latent_row=576, index_row=132, layers=78, index_layers=21)
    assert (per_tensor.latent, per_tensor.index) == (44_928, 2_772)
    costs = [f"{per_tensor.replication_cost(w):.1%}" for w in (2, 4, 8)]
    assert costs == ["5.8%", "17.4%", "40.7%"]
    assert [f"{per_tensor.ratio(w, True):.3f}" for w in (2, 4)] == ["1.890", "3.406"]
    # reported 1.80x and 3.07x, with 6.4 and 14.1 GB of a pool of 141.7 GB lost to workspace
    reported = [per_tensor.ratio(w, True, lost / 141.7) for w, lost in ((2, 6.4), (4, 14.1))]
    assert [f"{ratio:.2f}" for ratio in reported] == ["1.80", "3.07"]
    rows = CacheBytes.of(V32, layout())
    assert (rows.latent_row, rows.index_row, rows.latent + rows.index) == (656, 132, 48_068)
    assert CacheBytes.of(V32, layout(kv_dtype="bfloat16")).latent_row == 1152


@pytest.mark.parametrize(
    ("cfg", "ratios", "costs"),
    [
        (V32, ["1.71", "2.66", "3.68"], ["17%", "50%", "117%"]),
        (GLM5, ["1.71", "2.66", "3.68"], ["17%", "50%", "117%"]),
        (GLM52, ["1.90", "3.47", "5.88"], ["5%", "15%", "36%"]),
    ],
    ids=NAMES,
)
def test_replicated_index(cfg, ratios, costs):
    cache = CacheBytes.of(cfg, layout())
    assert [f"{cache.ratio(w, True):.2f}" for w in (2, 4, 8)] == ratios
    assert [f"{cache.replication_cost(w):.0%}" for w in (2, 4, 8)] == costs
    assert [cache.ratio(w) for w in (2, 4, 8)] == pytest.approx([2, 4, 8])


@dataclass(frozen=True)
class Capacity:
    """Thousands of tokens that fit: sharded index, and replicated."""

    cfg: ModelConfig
    on: str
    pool: float
    sharded: tuple[int, ...]
    replicated: tuple[int, ...]


@pytest.mark.parametrize(
    "case",
    [
        Capacity(V32, "H200", 36.0, (747, 1495, 2991, 5983), (1281, 1990, 2754)),
        Capacity(GLM5, "H200", 27.0, (440, 880, 1760, 3520), (753, 1171, 1619)),
        Capacity(GLM52, "H200", 27.6, (511, 1022, 2045, 4090), (972, 1772, 3008)),
        Capacity(V32, "MI355X", 168, (3500, 7000, 14001, 28002), (5996, 9318, 12888)),
    ],
    ids=lambda case: f"{case.cfg.model_type}-{case.on}-{case.pool}",
)
def test_tokens_that_fit(case):
    pool = published_pool(case.cfg, case.on)
    assert pool / 1e9 == pytest.approx(case.pool, abs=0.3)
    for replicated, published in ((False, case.sharded), (True, case.replicated)):
        for w, thousands in zip(DCP_SIZES[-len(published) :], published, strict=True):
            on = layout(w, index_replicated=replicated)
            assert largest_pool(case.cfg, on, pool).tokens // 1000 == thousands


def test_tokens_that_fit_with_mxfp4_experts():
    """4 x MI355X: 100.9 GB of weights are given, not computed."""
    for w, thousands in ((1, 2822), (2, 5645), (4, 11290)):
        pool = 0.9 * 288e9 - 100.95e9 - 6e9
        fits = largest_pool(GLM52, layout(w, tp=4), pool)
        assert fits.tokens / 1e3 == pytest.approx(thousands, abs=1)


def test_weights_of_the_capacity_table():
    assert [f"{published_weights(cfg) / 1e9:.1f}" for cfg in CONFIGS.values()] == [
        *("84.9", "93.9", "93.3")
    ]
    # We hold more: q_a and kv_a whole on each rank, and the router in float32.
    for cfg in CONFIGS.values():
        held = sum(weight_bytes(cfg, layout()).values())
        assert 1.014 < held / published_weights(cfg) < 1.019


@dataclass(frozen=True)
class Exchange:
    """Kilobytes received by a rank in a layer: queries, candidates, merge."""

    cfg: ModelConfig
    dcp_size: int
    rows: int
    kilobytes: tuple[int, int, int]


@pytest.mark.parametrize(
    "case",
    [
        Exchange(V32, 8, 1, (129, 115, 115)),
        Exchange(V32, 8, 32, (4129, 3670, 3684)),
        Exchange(V32, 8, 128, (16515, 14680, 14737)),
        Exchange(V32, 4, 32, (1769, 1573, 1579)),
        Exchange(V32, 4, 128, (7078, 6291, 6316)),
        Exchange(GLM5, 8, 32, (2064, 3670, 1842)),
        Exchange(GLM5, 8, 128, (8258, 14680, 7369)),
        Exchange(GLM5, 4, 32, (885, 1573, 790)),
        Exchange(GLM5, 4, 128, (3539, 6291, 3158)),
    ],
    ids=lambda case: f"{case.cfg.model_type}-W{case.dcp_size}-B{case.rows}",
)
def test_exchange_kilobytes(case):
    found = layer_exchange(case.cfg, layout(case.dcp_size), case.rows, pairs=2048, bytes_per_pair=8)
    got = (found.q, found.candidates, found.merge)
    assert [round(size / 1e3) for size in got] == list(case.kilobytes)


def test_replicated_queries():
    for cfg, sizes in ((V32, ["5.8", "17.3", "40.4"]), (GLM5, ["5.0", "14.9", "34.9"])):
        layouts = [layout(w, replicate_q_proj=True) for w in (2, 4, 8)]
        assert [f"{q_replication_bytes(cfg, on) / 1e6:.1f}" for on in layouts] == sizes
    times = [q_replication_seconds(V32, on, device("H200")) * 1e6 for on in map(layout, (2, 4, 8))]
    assert [round(t, 1) for t in times] == [1.3, 4.0, 9.4]
    more = layout(4, replicate_q_proj=True)
    added = sum(weight_bytes(V32, more).values()) - sum(weight_bytes(V32, layout(4)).values())
    assert added == 61 * q_replication_bytes(V32, more)
    assert layer_exchange(V32, more, 1, pairs=1, bytes_per_pair=6).q == 0


@pytest.mark.parametrize(
    ("alpha", "milliseconds"),
    [
        (3, (0.55, 0.37, 0.53, 0.30, 0.77)),
        (5, (0.92, 0.61, 0.89, 0.49, 1.28)),
        (10, (1.83, 1.22, 1.77, 0.99, 2.55)),
        (18, (3.29, 2.20, 3.19, 1.78, 4.59)),
        (25, (4.58, 3.05, 4.42, 2.48, 6.38)),
    ],
)
def test_latency_floors(alpha, milliseconds):
    counts = (
        collectives_per_step(V32, layout(8)),
        collectives_per_step(V32, layout(8, replicate_q_proj=True)),
        collectives_per_step(GLM52, layout(8)),
        collectives_per_step(GLM52, layout(8, replicate_q_proj=True)),
        collectives_per_step(GLM52, layout(8, dcp_comm="ag_rs")),
    )
    found = [alpha * count / 1e3 for count in counts]
    assert found == pytest.approx(milliseconds, abs=0.0051)
    assert collectives_per_step(V32, layout(1)) == 0


# Cells W=1/2/4/8; columns 8k, 32k, 128k, 1M; rows B=1, 8, 32, 128; x: B*S does not fit.
STEP_FLOORS = {
    (V32, "H200"): """
        2.6/4.0/4.0/4.1  2.7/4.0/4.0/4.1  2.9/4.1/4.1/4.1  x/5.1/4.6/4.3
        6.7/8.0/8.0/8.3  7.1/8.2/8.1/8.3  x/9.0/8.5/8.5  x/x/x/x
        16.0/16.8/16.9/18.0  x/17.6/17.3/18.2  x/x/x/19.0  x/x/x/x
        x/27.1/27.5/31.9  x/x/x/32.7  x/x/x/x  x/x/x/x""",
    (GLM52, "H200"): """
        2.5/3.5/3.5/3.5  2.5/3.5/3.5/3.5  2.6/3.6/3.5/3.5  x/x/3.7/3.6
        7.0/7.8/7.8/7.9  7.1/7.9/7.8/7.9  x/x/8.0/8.0  x/x/x/x
        17.2/17.4/17.2/17.6  x/x/17.4/17.7  x/x/x/x  x/x/x/x
        x/x/27.4/28.9  x/x/x/x  x/x/x/x  x/x/x/x""",
    (V32, "MI355X"): """
        2.1/3.5/3.5/3.6  2.2/3.5/3.5/3.6  2.3/3.6/3.6/3.6  3.6/4.3/3.9/3.7
        4.8/6.2/6.2/6.5  5.1/6.3/6.3/6.5  6.2/6.9/6.6/6.6  x/x/9.2/7.9
        10.9/12.0/12.3/13.3  12.0/12.6/12.6/13.4  x/14.8/13.7/14.0  x/x/x/x
        18.5/18.9/19.9/23.8  x/21.1/21.0/24.4  x/x/x/26.6  x/x/x/x""",
    (GLM52, "MI355X"): """
        2.0/3.0/3.0/3.0  2.0/3.0/3.0/3.0  2.0/3.1/3.0/3.0  2.5/3.3/3.2/3.1
        4.9/5.9/5.9/6.0  5.0/5.9/5.9/6.0  5.4/6.1/6.0/6.1  x/x/6.9/6.5
        11.6/12.2/12.3/12.7  11.9/12.4/12.4/12.8  x/13.2/12.8/12.9  x/x/x/x
        19.5/19.1/19.2/20.9  x/19.9/19.6/21.1  x/x/x/21.9  x/x/x/x""",
}


@pytest.mark.parametrize(
    ("cfg", "on"), STEP_FLOORS, ids=[f"{cfg.model_type}-{on}" for cfg, on in STEP_FLOORS]
)
def test_step_floors(cfg, on):
    rows = STEP_FLOORS[cfg, on].strip().splitlines()
    pool, weights = published_pool(cfg, on), without_router(cfg, layout())
    for requests, row in zip(REQUESTS, rows, strict=True):
        for context, cell in zip(CONTEXTS, row.split(), strict=True):
            for w, published in zip(DCP_SIZES, cell.split("/"), strict=True):
                fits = largest_pool(cfg, layout(w), pool).tokens >= requests * context
                where = f"B={requests} S={context} W={w}"
                assert fits == (published != "x"), where
                if fits:
                    time = step_time(
                        *(cfg, layout(w), device(on), requests, context),
                        calibration=PUBLISHED,
                        weights=weights,
                    )
                    # 0.05 is the rounding of the table; 0.007 our weights_proj and scales.
                    assert time.total * 1e3 == pytest.approx(float(published), abs=0.057), where


THROUGHPUTS = {
    V32: """1.57/2.17/3.45/4.86 1.15/1.46/2.14/3.07 0.79/1.02/1.44/1.98
            0.46/0.65/1.01/1.37 0.27/0.35/0.65/0.97 0/0.20/0.35/0.63""",
    GLM52: """1.37/1.78/2.68/4.28 1.05/1.29/1.79/2.60 0.72/0.92/1.29/1.75
              0.37/0.59/0.93/1.27 0/0.27/0.59/0.92 0/0/0.27/0.58""",
}


@pytest.mark.parametrize("cfg", THROUGHPUTS, ids=lambda cfg: cfg.model_type)
def test_throughput_at_capacity(cfg):
    pool, weights = published_pool(cfg, "H200"), without_router(cfg, layout())
    for context, cell in zip((2**i for i in range(15, 21)), THROUGHPUTS[cfg].split(), strict=True):
        for w, published in zip(DCP_SIZES, cell.split("/"), strict=True):
            requests = min(512, largest_pool(cfg, layout(w), pool).requests(context))
            rate = 0.0
            if requests:
                args = (cfg, layout(w), device("H200"), requests, context)
                time = step_time(*args, calibration=PUBLISHED, weights=weights)
                rate = requests / time.total / 1e3
            assert rate == pytest.approx(float(published), abs=0.011), f"S={context} W={w}"


@pytest.mark.parametrize(
    ("cfg", "dcp_size", "kibi"),
    [
        (V32, 4, (887, 108, 25, 4)),
        (V32, 8, (780, 112, 41, 23)),
        (GLM5, 8, (766, 98, 26, 8)),
        (GLM52, 8, (1642, 185, 29, 0)),
    ],
)
def test_break_even_context(cfg, dcp_size, kibi):
    """Thousands of 1024 tokens; 0: DCP is always faster."""
    found = [
        break_even_context(cfg, layout(dcp_size), device("H200"), requests, PUBLISHED)
        for requests in REQUESTS
    ]
    assert [None if f is None else f / 1024 for f in found] == pytest.approx(kibi, abs=0.6)


def test_break_even_law():
    """About 0.9M tokens in flight for DeepSeek-V3.2, and never with a replicated index."""
    laws = [break_even_tokens(V32, layout(w), device("H200")) / 1e6 for w in (4, 8)]
    assert laws == pytest.approx([0.97, 0.83], abs=0.005)
    replicated = layout(8, index_replicated=True)
    assert break_even_tokens(V32, replicated, device("H200")) == math.inf
    # A smaller alpha moves it down; the full model agrees with the law at B=1.
    fast = break_even_tokens(V32, layout(8), device("H200"), Calibration(alpha=1e-6))
    assert fast < laws[1] * 1e6
    context = break_even_context(V32, layout(8), device("H200"), 1)
    assert context == pytest.approx(laws[1] * 1e6, rel=0.1)


def test_skew_of_the_busiest_rank():
    assert [round(skew(2048, w), 3) for w in DCP_SIZES] == [1.0, 1.012, 1.039, 1.083]


def test_comparison_recommends_by_throughput_under_the_limit():
    base = Deployment(GLM52, layout(), device("H200"), max_running_requests=512)
    free = compare(base, context=131072, concurrency=8)
    assert [row.name for row in free.rows] == ["W=1", "W=2", "W=4", "W=8", "attn DP"]
    assert (free.recommended, free.attention_dp_wins) == (8, False)
    rates = [row.best.tokens_per_second for row in free.rows[:4] if row.best]
    assert rates == sorted(rates)
    hurried = compare(base, context=131072, concurrency=8, limit=3e-3)
    assert hurried.recommended == 1
    best = hurried.rows[0].best
    assert best is not None
    assert best.tpot <= 3e-3
    assert compare(base, context=131072, concurrency=8, limit=1e-3).recommended is None


def test_attention_dp_wins_at_high_concurrency():
    """Where memory allows many requests: it wastes no heads and exchanges nothing in attention."""
    base = Deployment(V32, layout(), device("MI355X"), max_running_requests=512)
    many = compare(base, context=8192, concurrency=256)
    assert many.attention_dp_wins
    assert many.attention_dp_from is not None
    assert 1 < many.attention_dp_from < 256
    dp, tp = many.rows[-1], many.rows[0]
    assert dp.step is not None
    assert tp.step is not None
    assert dp.step.total < tp.step.total
    attention = weight_bytes(V32, layout())["attention"]
    assert dp.weights - tp.weights > 3 * attention
    # A request must fit on one rank, and few requests leave ranks idle.
    assert dp.pool.tokens == 8 * dp.pool.largest_request
    assert not compare(base, context=8192, concurrency=1, limit=3.7e-3).attention_dp_wins


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"context": 0}, "context=0"),
        ({"concurrency": -1}, "concurrency=-1"),
        ({"limit": 0.0}, "limit=0.0"),
        ({"context": 200_000}, "context=200000 exceeds.*163840"),
    ],
)
def test_comparison_refuses(changes, says):
    base = Deployment(V32, layout(), device("H200"))
    with pytest.raises(ValueError, match=says):
        compare(base, **{"context": 8192, "concurrency": 8, **changes})
    with pytest.raises(ValueError, match="no device to plan for"):
        compare(replace(base, device=None), context=8192, concurrency=8)
