"""`dcp-jax plan` and `check-config`: what they print, what they refuse and what would do."""

import json
import sys
from dataclasses import dataclass, replace

import pytest

from dcp_jax.cli import main
from dcp_jax.config import ModelConfig
from dcp_jax.configs import named_config
from dcp_jax.plan import Deployment, Layout, check, device

FP8 = ["--weights", "fp8", "--kv-cache-dtype", "fp8"]
NODE = ["--device", "H200", "--tp", "8"]


@pytest.fixture
def run(capsys):
    """Runs the command line: (exit code, words of stdout, stderr)."""

    def call(*args):
        try:
            main(list(args))
            code = 0
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, " ".join(out.replace("│", " ").split()), err

    return call


def test_plan_prints_a_row_per_layout_and_a_recommendation(run):
    code, out, _ = run("plan", "glm-5.2", "--device", "h200", "--context", "131072")
    assert code == 0
    for text in (
        "glm-5.2 on 8 x H200: fp8 weights (94.9 GB a rank), fp8_e4m3 caches",
        "layout ┃ pool GB ┃ tokens ┃ requests ┃ ms, B=8 ┃ tok/s, all ┃ break-even",
        "W=1 26.0 482k 3 x 706 -",
        "W=8 26.0 3,853k 29 8.05 1,708 179.7k",
        "attn DP 15.8 2,345k 16 9.13 1,236 -",
        "Recommended: dcp_size=8: 1,708 tokens/s with 29 requests, TPOT 17.0 ms.",
        "Attention data parallelism does not win here: 1,236 tokens/s with 16 requests;",
        "W=8: pays in latency from about 1,811,885 tokens in flight on; a replicated index costs "
        "36.0% memory per token",
    ):
        assert text in out


def test_plan_under_a_limit(run):
    code, out, _ = run("plan", "deepseek-v3.2", "--context", "32768", "--tpot-ms", "20")
    assert code == 0
    assert "Recommended: dcp_size=4 with TPOT <= 20 ms" in out
    code, out, _ = run("plan", "deepseek-v3.2", "--context", "32768", "--tpot-ms", "1")
    assert "No dcp_size decodes a request of 32,768 tokens with TPOT <= 1 ms here." in out


def test_plan_as_json(run):
    args = ["--context", "32768", "--concurrency", "300", "--index-cache", "replicated", "--json"]
    code, out, _ = run("plan", "deepseek-v3.2", *args)
    plan = json.loads(out)
    assert code == 0
    assert [row["name"] for row in plan["rows"]] == ["W=1", "W=2", "W=4", "W=8", "attn DP"]
    assert plan["recommended"] == 8
    assert plan["rows"][3]["law_tokens"] is None  # infinite: a replicated index saves no scan
    assert plan["rows"][3]["step"] is None  # 300 requests do not fit
    assert plan["rows"][0]["at_capacity"]["requests"] == 22


def test_plan_takes_a_checkpoint_directory(run, golden):
    args = ["--tp", "3", "--context", "256", "--page-size", "4", "--json"]
    code, out, _ = run("plan", str(golden("p3").path), *args)
    assert code == 0
    assert [row["name"] for row in json.loads(out)["rows"]] == ["W=1", "attn DP"]


def test_plot_needs_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("plan", "glm-5.2", "--plot", str(tmp_path / "plan.png"))
    assert code == 2
    assert "needs matplotlib" in err
    assert "'notebooks' extra" in err


def test_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert run("plan", "glm-5.2", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    code, _, err = run("plan", "glm-5.2", "--plot", str(tmp_path / "no" / "plan.png"))
    assert code == 2
    assert "cannot be written" in err


def test_check_config_prints_everything(run):
    flags = [*NODE, "--dcp-size", "8", *FP8, "--max-model-len", "200000"]
    code, out, _ = run("check-config", "glm-5.2", *flags)
    assert code == 0
    assert "Planned with FP8 weights, which the engine does not read yet." in out
    for text in (
        "position p lies on rank p % 8, in its local row p // 8",
        "64 rows a rank, 512 tokens in all",
        "prefix reuse in multiples of 512 tokens",
        "tokens per rank 481,664",
        "tokens in all 3,853,312",
        "656 B a token and layer, 51,168 B in 78 layers",
        "132 B a token and layer, 2,772 B in 21 layers",
        "padding none",
        "weights in all 94.92 GB",
        "peak of a step: prefill, mha_one_shot, 1 x 2048 tokens",
        "peak of a step: prefill, gathered, 1 x 8192 tokens",
        "peak of a step: prefill, gathered_split_indexer, 1 x 8192 tokens",
        "peak of a step: prefill, owned, 1 x 2048 tokens",
        "left for a step 14.10 GB",
        "(8 heads a rank, 64 gathered)",
        "queries of gathered heads 9.44 MB",
        "candidates 21.22 MB 0 B 0 B 0 B 679.18 MB",
    ):
        assert text in out


def test_check_config_without_a_device(run, golden):
    flags = ["--tp", "3", "--dcp", "3", "--max-total-tokens", "1000", "--page-size", "4"]
    code, out, _ = run("check-config", str(golden("p1").path), *flags)
    assert code == 0
    assert "vocab 257 -> 258" in out
    assert "tokens in all 1,008" in out
    assert "left for a step" not in out
    code, out, _ = run("check-config", str(golden("p1").path), *flags, "--json")
    found = json.loads(out)
    assert found["padding"]["vocab"] == [257, 258]
    assert found["prefix_granularity"] == 12
    assert found["pool"]["tokens"] == 1008


@dataclass(frozen=True)
class Refusal:
    """A command line, what its refusal says of the reason, and the settings that it names."""

    id: str
    args: list[str]
    says: str
    fix: str


REFUSALS = [
    Refusal("name", ["plan", "glm-4"], "'glm-4' is no released model", "glm-5.2"),
    Refusal("device", ["plan", "glm-5", "--device", "A1"], "device='A1'", "H200, MI355X"),
    Refusal(
        "weights",
        ["check-config", "glm-5.2", *NODE],
        "188.8 GB of bfloat16 weights per rank (tp=8, dcp_size=1)",
        "--tp 16; or --weights fp8",
    ),
    Refusal(
        "weights-and-pool",
        ["check-config", "glm-5.2", *NODE, "--max-total-tokens", "1000"],
        "188.8 GB of bfloat16 weights per rank",
        "--tp 16; or --weights fp8",
    ),
    Refusal(
        "plan-weights",
        ["plan", "glm-5.2", "--device", "H100", "--tp", "4"],
        "of H100's 80 GB",
        "--tp 16",
    ),
    Refusal(
        "context",
        ["check-config", "glm-5.2", *NODE, *FP8, "--max-model-len", "600000"],
        "max_model_len=600000 does not fit the pool of 481664 tokens",
        "--dcp-size 2; or --tp 16; or --mem-fraction-static 0.95; or --max-model-len 481664",
    ),
    Refusal(
        "trained-context",
        ["check-config", "deepseek-v3.2", *NODE, *FP8, "--max-model-len", "200000"],
        "max_model_len=200000 exceeds max_position_embeddings=163840",
        "--max-model-len 163840",
    ),
    Refusal(
        "pool",
        ["check-config", "deepseek-v3.2", *NODE, "--dcp", "2", "--max-total-tokens", "2000000"],
        "max_total_tokens=2000000 takes 85.89 GB per rank",
        "--dcp-size 8; or --max-total-tokens 807168",
    ),
    Refusal(
        "workspace",
        [
            *("check-config", "deepseek-v3.2", *NODE, "--dcp", "8", *FP8),
            *("--chunked-prefill-size", "65536"),
        ],
        "a prefill, gathered_split_indexer step of 1 x 65536 tokens needs",
        "--chunked-prefill-size 32768",
    ),
    Refusal(
        "rows",
        ["check-config", "glm-5", "--max-total-tokens", "30000000", *FP8],
        "rows a rank, more than int32 can number",
        "--max-total-tokens 27531",
    ),
    Refusal(
        "no-size", ["check-config", "glm-5"], "neither device nor max_total_tokens", "--device"
    ),
    Refusal(
        "dcp",
        ["check-config", "glm-5", *NODE, "--dcp", "3"],
        "dcp_size=3 does not divide tp=8",
        "[1, 2, 4, 8]",
    ),
    Refusal(
        "two-reasons",
        [
            *("check-config", "glm-5.2", *NODE, "--dcp", "2", *FP8, "--max-model-len", "1000000"),
            *("--chunked-prefill-size", "262144"),
        ],
        "max_model_len=1000000 does not fit the pool of 963328 tokens (tp=8, dcp_size=2, "
        "fp8_e4m3); a prefill, gathered_split_indexer step of 1 x 262144 tokens needs",
        "What does: --dcp-size 4 with --chunked-prefill-size 65536.",
    ),
    Refusal("tp", ["plan", "glm-5", "--tp", "0"], "tp=0 is not a count", "at least 1"),
    Refusal(
        "fraction",
        ["plan", "glm-5", "--mem-fraction-static", "1.5"],
        "mem_fraction_static=1.5",
        "above 0 and at most 1",
    ),
    Refusal("rows-0", ["plan", "glm-5", "--max-num-seqs", "0"], "max_running_requests=0", "1"),
    Refusal("long", ["plan", "glm-5", "--context", "300000"], "context=300000", "202752"),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in REFUSALS])
def test_refusals_name_the_value_and_what_would_do(case, run):
    code, _, err = run(*case.args)
    assert code == 2
    assert case.says in err
    assert case.fix in err
    assert "Traceback" not in err


def test_named_settings_work():
    """What a refusal names is accepted, and the next smaller setting is not."""
    cfg = ModelConfig.from_hf(named_config("glm-5.2"))
    wanted = Deployment(
        cfg,
        Layout(tp=8, weights="fp8", kv_dtype="fp8_e4m3"),
        device("H200"),
        max_model_len=1_000_000,
    )
    with pytest.raises(ValueError, match=r"--dcp-size 4; .*--max-model-len 481664"):
        check(wanted)
    assert check(replace(wanted, layout=replace(wanted.layout, dcp_size=4))).pool.tokens > 10**6
    with pytest.raises(ValueError, match="max_model_len=1000000"):
        check(replace(wanted, layout=replace(wanted.layout, dcp_size=2)))
    assert check(replace(wanted, max_model_len=481664)).max_model_len == 481664
    assert check(replace(wanted, max_model_len=None)).max_model_len == 481664


def test_attention_dp_is_compared_but_not_run():
    cfg = ModelConfig.from_hf(named_config("glm-5.2"))
    with pytest.raises(ValueError, match="engine does not have it"):
        check(Deployment(cfg, Layout(tp=8, attention_dp=True), device("H200")))
    with pytest.raises(ValueError, match="attention_dp with dcp_size=2"):
        Layout(tp=8, dcp_size=2, attention_dp=True)
