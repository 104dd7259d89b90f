"""Models by name, in every place that takes a model."""

import json

import pytest

import dcp_jax as dj
from dcp_jax import named
from dcp_jax.cli import main
from dcp_jax.cli.plan import load_config
from dcp_jax.named import find_model
from dcp_jax.testing.harness import tiny_config
from dcp_jax.testing.stand_in import write_stand_in

# Small enough to run in a second or two, with text.
SMALL = tiny_config(vocab_size=264, num_nextn_predict_layers=0, num_hidden_layers=1) | {
    "indexer_types": ["full"],
    "mlp_layer_types": ["dense"],
}


@pytest.fixture
def box(tmp_path, monkeypatch):
    """An installation whose box holds a small model by the name of tiny-dsa."""
    monkeypatch.setattr(named, "_PLACES", (tmp_path / "wheel", tmp_path / "checkout"))
    return write_stand_in(tmp_path / "checkout" / "tiny-dsa", **SMALL)


def test_a_directory_wins_over_a_name(box, tmp_path, monkeypatch):
    assert find_model("tiny-dsa") == box
    assert find_model(box.parent) == box.parent
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-dsa").mkdir()
    assert find_model("tiny-dsa").resolve() == tmp_path / "tiny-dsa"


def test_a_wheel_has_it_inside(box, tmp_path):
    inside = write_stand_in(tmp_path / "wheel" / "tiny-dsa", **SMALL)
    assert find_model("tiny-dsa") == inside


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(named, "_PLACES", (tmp_path,))
    with pytest.raises(ValueError, match=r"but this installation has none of its files"):
        find_model("tiny-dsa")
    with pytest.raises(ValueError, match=r"tiny holds no config.json: .* in the box \(tiny-dsa\)"):
        find_model("tiny")


def test_llm_and_commands_take_the_name(box, capsys):
    llm = dj.LLM("tiny-dsa", dtype="float32", max_model_len=64, max_running_requests=1)
    greedy = dj.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (out,) = llm.generate("ab", greedy, use_tqdm=False)
    args = ["--dtype", "float32", "--max-model-len", "64", "--max-running-requests", "1"]
    sampling = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos"]
    main(["generate", "tiny-dsa", "--prompt", "ab", "--json", *args, *sampling])
    printed = json.loads(capsys.readouterr().out)
    assert printed["outputs"][0]["token_ids"] == out.outputs[0].token_ids
    assert load_config("tiny-dsa").vocab_size == 264


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "tiny-dsa", "--prompt", "a"],
        ["explain", "tiny-dsa", "--prompt", "a"],
        ["chat", "tiny-dsa"],
        ["demo", "tiny-dsa"],
        ["plan", "tiny-dsa"],
        ["check-config", "tiny-dsa"],
        ["selfcheck", "tiny-dsa"],
        ["bench", "prefill", "tiny-dsa"],
        ["bench", "passkey", "tiny-dsa"],
    ],
    ids=" ".join,
)
def test_a_command_says_that_the_model_is_missing(args, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(named, "_PLACES", (tmp_path,))
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    assert "tiny-dsa is a model in the box" in capsys.readouterr().err
