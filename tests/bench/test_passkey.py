"""Passkey prompts, counting, comparing, and margins."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dcp_jax as dj
from dcp_jax.bench import passkey_compare as comparing
from dcp_jax.bench.passkey import Outcome, Prompt, cells_of, prompts_of, report, text_model
from dcp_jax.bench.passkey_trials import Trial, _sentences, answered, document_of, trials_of
from dcp_jax.cli import main
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import tiny_config
from dcp_jax.testing.margins import MarginMeter
from dcp_jax.testing.stand_in import write_stand_in


def size(text: str) -> int:
    return len(text.encode())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Random weights with a byte tokenizer; 384 tokens are more than it selects."""
    config = tiny_config(vocab_size=264, index_topk=32, num_hidden_layers=2)
    config |= {"indexer_types": ["full"] * 2, "mlp_layer_types": ["dense"] * 2}
    return write_stand_in(tmp_path_factory.mktemp("small"), **config, num_nextn_predict_layers=0)


# Prompts


@pytest.mark.parametrize("keys", [1, 2, 8])
@pytest.mark.parametrize("depth", [0.0, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("length", [1024, 5000])
def test_a_document_hides_its_key(length, depth, keys):
    seen = set()
    for number in range(6):
        document = document_of(Trial(length, depth, keys, number, seed=3), size)
        assert length - 24 < size(document.text) <= length
        assert document.text.endswith("key is " if keys == 1 else " is ")
        body, question = document.text.rsplit("\n", 1)
        assert document.digits not in question
        assert len(document.places) == (2 if keys == 1 else 1)
        for start, end in document.places:
            assert document.text[start:end] == document.digits
        if 0 < depth < 1:
            # A short text has long needles beside its filler, so its depths are coarse.
            assert document.places[0][0] / len(body) == pytest.approx(depth, abs=0.2)
        name = question.split("?")[0].split()[-1] if keys > 1 else None
        key = f"The pass key of {name} is {document.digits}." if name else "The pass key is "
        assert body.count(key) == 1
        assert body.count("The pass key of ") == (keys if keys > 1 else 0)
        strewn = len(document.distractors) - (keys - 1)
        assert strewn > 0 or (keys == 1 and number % 2 == 1)
        assert len({document.digits, *document.distractors}) == 1 + len(document.distractors)
        seen.add(document.text)
    assert len(seen) == 6


def test_a_document_is_the_same_for_ever():
    trial = Trial(1024, 0.5, 2, 7, seed=1)
    assert document_of(trial, size) == document_of(trial, size)
    for other in (replace(trial, seed=2), replace(trial, number=8), replace(trial, length=1100)):
        assert document_of(other, size).digits != document_of(trial, size).digits


def test_filler_has_no_digits_and_each_sentence_is_new():
    sentences = _sentences()
    assert len(sentences) == len(set(sentences)) >= 60
    assert not any(character.isdigit() for sentence in sentences for character in sentence)


@pytest.mark.parametrize(
    ("text", "number"),
    [("71432.", "71432"), (" 71432", "71432"), ("714321", "714321"), ("The 7", None), ("", None)],
)
def test_what_counts_as_an_answer(text, number):
    assert answered(text) == number


REFUSED = [
    (lambda: trials_of([1024], [1.5], 1), "depth 1.5 lies outside"),
    (lambda: trials_of([1024], [0.5], 1, keys=[9]), "9 needles are not tried: give 1 to 8"),
    (lambda: trials_of([1024], [0.5], 0), "no trial"),
    (lambda: document_of(Trial(200, 0.5, keys=8), size), "no room for 8 keys"),
]


@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_trials_that_cannot_be(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# Counting


def outcomes(texts: list[str], keys: int = 1) -> list[Outcome]:
    trials = trials_of([1024], [0.1, 0.9], len(texts) // 2, keys=[keys])
    documents = [document_of(trial, size) for trial in trials]
    return [
        Outcome(Prompt(t, d, (1, 2), 6), text.replace("RIGHT", d.digits), (3,))
        for t, d, text in zip(trials, documents, texts, strict=True)
    ]


def test_cells_and_misses():
    found = outcomes(["RIGHT.", "RIGHT9", "no", " RIGHT"])
    assert [(c.depth, c.hits, c.trials) for c in cells_of(found)] == [(0.1, 1, 2), (0.9, 1, 2)]
    written = report(found)
    assert (written["hits"], written["trials"]) == (2, 4)
    assert [miss["number"] for miss in written["misses"]] == [1, 0]
    assert written["misses"][1]["answer"] == "no"


def test_variants():
    every = comparing.variants_of()
    # W x (policy and four paths) x index x precision
    assert len(set(every)) == len(every) == 3 * 5 * 2 * 2
    alone = comparing.variants_of([1])
    assert {v.path for v in alone} == {None, PrefillPath.OWNED, PrefillPath.MHA_ONE_SHOT}
    assert comparing.REFERENCE not in alone
    dense = comparing.Variant(2, PrefillPath.MHA_ONE_SHOT)
    assert dense.takes(256, index_topk=256)
    assert not dense.takes(257, index_topk=256)


def test_how_many_answers_must_agree():
    exact = comparing.Agreement(comparing.Variant(2), 1000, 999, 0, ())
    assert not exact.holds
    coarse = replace(exact, variant=comparing.Variant(2, kv_cache_dtype="fp8_e4m3"))
    assert coarse.holds
    assert not replace(coarse, same=994).holds


# On a model


def test_margins_are_those_of_the_steps(small):
    ids = np.random.default_rng(0).integers(0, 256, 100).tolist()
    meter = MarginMeter(small, tokens=128, chunk=64)
    near = meter.measure(ids)
    llm = dj.LLM(small, dtype="float32", page_size=16, max_model_len=128, max_running_requests=1)
    first, second = np.sort(llm.score(ids, positions=[99])[0])[:-3:-1]
    assert near.logit_gap == pytest.approx(first - second, abs=1e-4)
    assert set(near.topk_margin) == {0, 1}
    assert all(0 < margin < np.inf for margin in near.topk_margin.values())
    assert all(m == np.inf for m in meter.measure(ids[:32]).topk_margin.values())
    selected = llm.explain(ids).topk_indices
    for layer, scores in meter.scores(ids).items():
        best = np.sort(np.argsort(-scores)[:32])
        np.testing.assert_array_equal(selected[layer][99], best)
    with pytest.raises(ValueError, match="129 tokens cannot be measured"):
        meter.measure([1] * 129)


def test_bench_counts_and_writes(small, tmp_path, capsys):
    output = tmp_path / "found.json"
    main(
        [
            *("bench", "passkey", str(small), "--lengths", "384", "--depths", "0.05", "0.95"),
            *("--trials", "2", "--needles", "1", "2", "--dcp-size", "2", "--page-size", "16"),
            *("--dtype", "float32", "--output", str(output)),
        ]
    )
    printed = capsys.readouterr().out
    assert "one of 2 named" in printed
    assert "0/2" in printed
    found = json.loads(output.read_text())
    assert (found["trials"], found["hits"], len(found["cells"])) == (8, 0, 4)
    assert len(found["misses"]) == 8
    assert found["options"]["dcp_size"] == 2


@pytest.mark.slow
def test_comparing_finds_equal_answers(small, tmp_path, monkeypatch):
    """A run of some of the variants; tests/model holds every path to the results of one rank."""
    some = [
        comparing.Variant(2, PrefillPath.GATHERED_SPLIT_INDEXER, "replicated"),
        comparing.Variant(2, PrefillPath.OWNED, kv_cache_dtype="fp8_e4m3"),
        comparing.Variant(2, PrefillPath.MHA_ONE_SHOT),
    ]
    assert set(some) <= set(comparing.variants_of([2]))
    monkeypatch.setattr(comparing, "variants_of", lambda sizes, precisions: some)
    output = tmp_path / "compared.json"
    args = ["bench", "passkey", str(small), "--lengths", "384", "--depths", "0.5", "--trials", "2"]
    code = 0
    try:
        main([*args, "--page-size", "16", "--compare", "2", "--output", str(output)])
    except SystemExit as stop:  # random weights may answer otherwise with coarser caches
        code = stop.code
    compared = json.loads(output.read_text())["compare"]
    # dense attention is left out: the prompts are longer than what is selected
    assert [one["variant"] for one in compared] == [variant.name for variant in some[:2]]
    exact = compared[0]
    assert exact["same"] == exact["trials"] == 2
    assert exact["holds"]
    assert code == int(not all(one["holds"] for one in compared))
    for one in compared:
        for difference in one["differences"]:
            assert difference["logit_gap"] > 0
            assert set(difference["topk_margin"]) == {"0", "1"}


def test_differences_are_measured_in_the_reference(small):
    _, config, tokenizer = text_model(small)
    prompts = prompts_of(trials_of([384], [0.5], 2), tokenizer, config)
    reference = [Outcome(prompt, "abc", (97, 98, 99)) for prompt in prompts]
    answers = [reference[0], replace(reference[1], text="abd", token_ids=(97, 98, 100))]
    variants = [comparing.Variant(2), comparing.Variant(2, PrefillPath.MHA_ONE_SHOT)]
    (found,) = comparing.compare(small, 32, reference, variants, lambda variant, some: answers)
    assert (found.trials, found.same, found.holds) == (2, 1, False)
    (difference,) = found.differences
    assert (difference.number, difference.token, difference.answer) == (1, 2, "abd")
    near = MarginMeter(small, tokens=400).measure([*prompts[1].token_ids, 97, 98])
    assert difference.logit_gap == pytest.approx(near.logit_gap, abs=1e-5)
    assert difference.topk_margin == pytest.approx(near.topk_margin, abs=1e-5)


REFUSALS = [
    (["P3"], "has no tokenizer.json, and a passkey is hidden in text"),
    (["SMALL", "--lengths", "4096"], "give lengths of at most 4090"),
    (["SMALL", "--lengths", "100"], "no room for 1 keys"),
    (["SMALL", "--depths", "2"], "depth 2.0 lies outside the text"),
    (["SMALL", "--compare", "x"], "--compare x is no list of dcp sizes"),
    (["SMALL", "--compare", "2", "--dcp-size", "2"], "--dcp-size has no effect beside --compare"),
    (["SMALL", "--batch", "0"], "--batch 0 asks nothing"),
    (["SMALL", "--output", "/nowhere/x.json"], "there is no directory /nowhere"),
]


@pytest.mark.parametrize(("args", "says"), REFUSALS, ids=[says for _, says in REFUSALS])
def test_refusals(args, says, small, golden, capsys):
    named = {"P3": str(golden("p3").path), "SMALL": str(small)}
    with pytest.raises(SystemExit) as stop:
        main(["bench", "passkey", *(named.get(arg, arg) for arg in args)])
    assert stop.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
