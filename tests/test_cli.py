"""The command line: what it prints, what it refuses, and its exit codes."""

import json
import shutil
from dataclasses import dataclass

import pytest

from dcp_jax.cli import main

IDS = ["--prompt-ids", "1,2,3"]


@pytest.fixture(scope="module")
def p3(golden):
    return str(golden("p3").path)


@pytest.fixture
def run(capsys):
    """Runs the command line: (exit code, stdout, stderr)."""

    def call(*args):
        try:
            main(list(args))
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


@pytest.mark.slow
def test_generate_prints_one_result_per_prompt(run, p3):
    flags = ["-tp", "2", "--dcp", "2", "--block-size", "4", "--dtype", "float32"]
    code, out, err = run("generate", p3, *flags, *IDS, "--prompt-ids", "4 5", "--max-tokens", "3")
    assert code == 0
    assert [line.split("]")[0] for line in out.splitlines()] == ["[0", "[1"]
    assert "vocab: zero-padded from 257 to 258 for tp=2" in err
    code, out, _ = run("generate", *IDS, "--model-path", p3, *flags, "--max-tokens", "3", "--json")
    result = json.loads(out)
    assert (code, result["prompt_token_ids"], len(result["outputs"][0]["token_ids"])) == (
        0,
        [1, 2, 3],
        3,
    )


def test_explain_prints_tables(run, p3):
    flags = ["--tp", "2", "--dcp-size", "2", "--page-size", "4", "--prefill.force", "owned"]
    code, out, _ = run("explain", p3, *flags, *IDS, "--positions")
    assert code == 0
    for text in ("prefill path owned", "rank 1", "candidates", "layer 3: [0, 1, 2]"):
        assert text in out


@dataclass(frozen=True)
class Refusal:
    id: str
    args: list[str]
    says: str


@pytest.fixture(scope="module")
def bytes_p3(golden, tmp_path_factory):
    """p3 with a byte tokenizer."""
    path = tmp_path_factory.mktemp("bytes")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden("p3").path / name, path)
    tokenizer = {"tokenizer_class": "ByteTokenizer", "special_tokens": ["<|eos|>"]}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(path)


@pytest.mark.slow
def test_sampled_text_repeats_by_its_seed(run, bytes_p3):
    args = ["generate", bytes_p3, "--prompt", "hello", "--dtype", "float32", "--max-tokens", "6"]
    first, second = (run(*args, "--seed", "3", "--temperature", "0.9", "--json") for _ in range(2))
    assert first[0] == 0
    assert first[1] == second[1]
    assert json.loads(first[1])["prompt"] == "hello"


@pytest.mark.slow
def test_a_chat_keeps_the_conversation(run, bytes_p3, monkeypatch):
    typed = iter(["hello", "", "/reset", "again", "x" * 600, "/exit"])
    monkeypatch.setattr("rich.console.Console.input", lambda *_: next(typed))
    args = ["chat", bytes_p3, "--temperature", "0", "--max-tokens", "4", "--dtype", "float32"]
    code, out, _ = run(*args)
    assert code == 0
    assert "The conversation starts over." in out
    assert "max_model_len is 512: shorten" in " ".join(out.split())
    code, out, _ = run(*args, "--message", "hello", "--system", "Be brief.")
    assert code == 0
    assert out.strip()


REFUSALS = [
    Refusal("no-model", ["generate", *IDS], "give the checkpoint directory once"),
    Refusal("no-such-dir", ["generate", "nowhere", *IDS], "nowhere holds no config.json"),
    Refusal("two-models", ["generate", "P3", "--model-path", "P3", *IDS], "once"),
    Refusal("no-prompt", ["generate", "P3"], "no prompt: give --prompt"),
    Refusal("bad-ids", ["generate", "P3", "--prompt-ids", "1,x"], "'1,x' is not a list"),
    Refusal("text", ["generate", "P3", "--prompt", "hello"], "no tokenizer.json"),
    Refusal("vocabulary", ["generate", "P3", "--prompt-ids", "257"], "outside the vocabulary"),
    Refusal("too-long", ["generate", "P3", *IDS, "--max-model-len", "2"], "3 tokens"),
    Refusal("max-tokens", ["generate", "P3", *IDS, "--max-tokens", "0"], "max_tokens=0"),
    Refusal("dcp", ["generate", "P3", *IDS, "--tp", "4", "--dcp-size", "3"], "one of [1, 2, 4]"),
    Refusal("ratio", ["explain", "P3", *IDS, "--prefill.owned-prefill-ratio", "-1"], "-1.0"),
    Refusal("unknown-flag", ["generate", "P3", *IDS, "--speculative-algorithm", "EAGLE"], "--spec"),
    Refusal("shared-layer", ["explain", "P3", *IDS, "--layers", "2"], "layers [2] have no indexer"),
    Refusal("chat-without-tokenizer", ["chat", "P3"], "has no tokenizer.json"),
    Refusal("temperature", ["generate", "P3", *IDS, "--temperature", "-1"], "temperature=-1.0"),
    Refusal("demo", ["demo", "nowhere"], "nowhere holds no config.json"),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in REFUSALS])
def test_refusals_exit_with_2_and_a_sentence(case, run, p3):
    code, out, err = run(*(p3 if arg == "P3" else arg for arg in case.args))
    assert code == 2
    assert case.says in out + err
    assert "Traceback" not in err
