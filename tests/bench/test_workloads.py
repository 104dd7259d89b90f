"""Workloads are made from a seed; the numbers of a run follow from the times of its tokens."""

import json

import pytest

from dcp_jax import cli
from dcp_jax.bench.metrics import Timing, summary
from dcp_jax.bench.workloads import workload

SIZES = {"num_prompts": 3, "turns": 4, "input_len": 30, "output_len": 5}


@pytest.mark.parametrize("name", ["random", "passkey", "multi-turn"])
def test_sizes_and_seeds(name):
    made = workload(name, 500, seed=1, **SIZES)
    assert len(made) == 3
    assert {len(turns) for turns in made} == {4 if name == "multi-turn" else 1}
    turns = [turn for conversation in made for turn in conversation]
    assert {len(turn.tokens) for turn in turns} == {30}
    assert {turn.output_len for turn in turns} == {5}
    assert all(0 <= token < 500 for turn in turns for token in turn.tokens)
    assert made == workload(name, 500, seed=1, **SIZES)
    assert made != workload(name, 500, seed=2, **SIZES)


def test_a_passkey_follows_its_marker_and_is_asked_for():
    for (turn,) in workload("passkey", 5000, seed=0, **SIZES | {"num_prompts": 20}):
        marker = turn.tokens[-1]
        at = turn.tokens.index(marker)
        assert turn.tokens[at + 1 : at + 6] == turn.expected
    with pytest.raises(ValueError, match="input_len=7 does not hold a key"):
        workload("passkey", 5000, seed=0, **SIZES | {"input_len": 7})


def test_numbers_of_a_run():
    """Two requests of 10 and 20 ms per token; one failed before its first token."""
    first = Timing(0.0, 100, [0.5, 0.51, 0.52], cached_tokens=64)
    second = Timing(0.1, 50, [0.2, 0.22, 0.24, 0.26])
    failed = Timing(0.1, 50, [], failed=True)
    result = summary(
        [first, second, failed], duration=2.0, devices=4, peak_running=2, peak_kv_use=0.5
    )
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (150, 7)
    assert result["output_throughput"] == 3.5
    assert result["output_throughput_per_device"] == 3.5 / 4
    assert result["cached_input_tokens"] == 64
    assert result["mean_ttft_ms"] == pytest.approx(300)
    assert result["median_tpot_ms"] == pytest.approx(15)
    assert result["interactivity"] == pytest.approx(1000 / 15)
    assert result["mean_itl_ms"] == pytest.approx((10 + 10 + 20 + 20 + 20) / 5)
    assert result["p99_e2el_ms"] == pytest.approx(160 + 0.99 * 360)


@pytest.mark.slow
def test_commands_on_a_small_model(golden, tmp_path, capsys):
    """Conversations of two turns: the second finds the first in the prefix cache."""
    model = [str(golden("p3").path), "--dtype", "float32", "--page-size", "4"]
    model += ["--max-running-requests", "2", "--chunked-prefill-size", "32"]
    model += ["--max-model-len", "64"]
    out = tmp_path / "result.json"
    sizes = ["--num-prompts", "2", "--turns", "2", "--input-len", "10", "--output-len", "6"]
    kind = ["--dataset-name", "multi-turn", "--output", str(out)]
    cli.main(["bench", "throughput", *model, *kind, *sizes])
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"]) == (4, 0)
    assert result["total_output_tokens"] == 24
    assert result["total_input_tokens"] == 2 * (10 + 26)
    # 15 of the 16 tokens of the first turn are read by then: three pages
    assert result["cached_input_tokens"] == 2 * 12
    cli.main(["bench", "engine", *model, "--context", "8", "--steps", "5", "--output", str(out)])
    times = json.loads(out.read_text())
    assert times["running"] == 2
    assert 0 < times["dispatch"] < times["device"] * 100
    assert "scheduler" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["throughput", "--input-len", "0"], "input_len=0 is not a count"),
        (["engine", "--steps", "0"], "steps=0 is not a count"),
        (["engine", "--output", "/nowhere/x.json"], "there is no directory /nowhere"),
    ],
)
def test_bad_options_are_refused_before_anything_loads(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", argv[0], "no-such-model", *argv[1:]])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
