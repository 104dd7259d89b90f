"""The training of the model in the box, at sizes that a CPU trains in seconds."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import documents, state
from tiny_training.config import BOS, CONFIG, EOS, model_config
from tiny_training.corpus import Corpus
from tiny_training.documents import TASKS, Answer, Document, collate, retrieval
from tiny_training.evaluate import Evaluator, evaluate
from tiny_training.export import byte_tokenizer, export, to_hf
from tiny_training.feeder import Feeder, batch_of
from tiny_training.loop import LOG_FILE, answered, train
from tiny_training.losses import MARGIN_NATS, losses, margin_loss, needle_rank
from tiny_training.model import ForwardOptions, ForwardResult, Tap, forward, init_params
from tiny_training.optimiser import balance, global_norms, init_state, parameter_count, round_24
from tiny_training.report import read_log, report
from tiny_training.selection import kth_key, score_of_key, segments, selection_mask, topk_mask
from tiny_training.stages import STAGES, Stage, with_steps
from tiny_training.state import load_state, save_state

import dcp_jax as dj
from dcp_jax.dcp.step import Batch as StepBatch
from dcp_jax.dcp.step import StepOptions
from dcp_jax.tokenizer import IncrementalDetokenizer, load_tokenizer
from dcp_jax.weights.hf import flatten
from dcp_jax.weights.safetensors_file import Checkpoint
from pallas_kernels.topk import local_topk, score_keys

SMALL = {
    "dtype": "float32",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 24,
    "indexer_types": ["full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
}
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "sparse"],
}
FLOAT32 = jnp.dtype("float32")
TEXT = np.frombuffer(b"The quick brown fox 12 jumps over the lazy dog, again. " * 200, np.uint8)
DENSE = Stage("first", 6, 128, 4, {"text": 0.5, "anchors": 0.5}, (3e-3, 3e-3), warm_up=1, drafts=2)
SPARSE = Stage(
    *("second", 6, 256, 2, {"keys": 0.5, "passkey": 0.5}, (3e-3, 1e-3)),
    **{"shortest": 256, "sparse": True, "fp8": True, "margin": 0.3},
)


@pytest.fixture(scope="module")
def cfg():
    return model_config(**SMALL)


@pytest.fixture(scope="module")
def params(cfg):
    """Parameters far enough from their first values that no term of the forward is idle."""
    rng = np.random.default_rng(3)
    noise = lambda p: p + 0.1 * rng.standard_normal(p.shape, np.float32)  # noqa: E731
    return jax.tree.map(noise, init_params(cfg, seed=0))


@pytest.fixture(scope="module")
def exported(cfg, params, tmp_path_factory) -> Path:
    return export(params, cfg, tmp_path_factory.mktemp("exported"), {**CONFIG, **SMALL})


def read(ids: list[int]) -> str:
    return "".join(chr(i) if i < 256 else f"<{i}>" for i in ids)


# Documents


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [320, 1500])
def test_documents_know_where_their_answers_come_from(task: str, length: int):
    labelled = 0
    for seed in range(20):
        document = TASKS[task](np.random.default_rng(seed), TEXT, length)
        ids, kinds = np.array(document.ids), np.array(document.kinds)
        assert len(ids) == len(kinds) <= length
        assert {answer.target for answer in document.answers} == set(
            np.flatnonzero(kinds == documents.ANSWER)
        )
        for target, needle, question in document.answers:
            assert 0 <= question < document.questions
            if needle >= 0:
                labelled += 1
                assert needle < target
                assert ids[needle] == ids[target]
    assert (labelled > 0) == (task != "text")


def test_retrieval_asks_for_the_right_key():
    rng = np.random.default_rng(0)
    document = retrieval(rng, TEXT, 2000, needles=6, named=True, asked=3, depth=0.5)
    text = read(document.ids)
    assert len(document.ids) == 2000
    for question in range(3):
        places = [a for a in document.answers if a.question == question]
        reply = read([document.ids[a.target] for a in places])
        name = text[: places[0].target].split("key of ")[-1].split(" is")[0]
        assert f"The pass key of {name} is {reply}" in text[: text.index("\nWhat is")]
        assert read([document.ids[a.needle] for a in places]) == reply
    assert abs(min(a.needle for a in document.answers if a.question == 0) / 2000 - 0.5) < 0.15


def test_a_chat_ends_with_the_end_token():
    document = retrieval(np.random.default_rng(1), TEXT, 600, chat=True)
    assert document.ids[0] == BOS
    assert document.ids[-1] == EOS
    assert [a.needle >= 0 for a in document.answers[-7:]] == [True] * 6 + [False]


def test_retrieval_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="do not fit into 100 tokens"):
        retrieval(np.random.default_rng(0), TEXT, 100, needles=16, named=True)


def test_batches_depend_on_the_step_alone():
    stage = STAGES[1]
    with Feeder(TEXT, seed=5, workers=0) as feeder:
        later = next(feeder.batches(stage, 7))
    for name, array in batch_of(stage, 7, 5, TEXT)._asdict().items():
        np.testing.assert_array_equal(array, getattr(later, name))
    assert later.tokens.shape == (stage.batch, stage.length + 3)
    labelled = later.needles >= 0
    assert labelled.any()
    after = np.take_along_axis(later.tokens, later.rows + 1, axis=1)
    found = np.take_along_axis(later.tokens, np.maximum(later.needles, 0), axis=1)
    assert (after == found)[labelled].all()


def test_feeder_processes_give_the_same_batches_in_order():
    stage = replace(DENSE, steps=5)
    with Feeder(TEXT, seed=0, workers=2) as feeder:
        batches = list(feeder.batches(stage, 2))
    assert len(batches) == 3
    for step, batch in enumerate(batches, start=2):
        np.testing.assert_array_equal(batch.tokens, batch_of(stage, step, 0, TEXT).tokens)


def test_accuracy_counts_whole_answers():
    document = Document(list(range(200)), [documents.FILLER] * 200, task="passkey")
    document.answers = [Answer(150, 20, 0), Answer(151, 21, 0), Answer(160, 30, 1)]
    batch = collate(np.random.default_rng(0), TEXT, [document], length=256, rows=8)
    correct = np.zeros(batch.targets.shape, bool)
    correct[0, [0, 2]] = True
    assert list(answered(batch, correct)) == [
        (("passkey", "<=512"), False),
        (("passkey", "<=512"), True),
    ]


# The forward against the engine


@pytest.mark.slow
def test_forward_is_the_engines(cfg, params, exported: Path):
    """Of the exported checkpoint, MTP logits included: the sparse forward beyond index_topk tokens,
    and the dense one up to it, where both are the same.
    """
    few, length = cfg.index_topk, 4 * cfg.index_topk + 3
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, length + 1).astype(np.int32)
    rows = jnp.zeros((1, 1), jnp.int32)

    @jax.jit
    def ours(params, ids):
        with jax.default_matmul_precision("highest"):
            sparse = forward(params, cfg, ids, rows, ForwardOptions(sparse=True), FLOAT32)
            dense = forward(params, cfg, ids[:, : few + 1], rows, ForwardOptions(), FLOAT32)
        return [(r.logits, r.draft_logits[0]) for r in (sparse, dense)]

    model = dj.Model(cfg, dj.make_mesh(), FLOAT32, with_mtp=True)
    loaded = dj.load_params(exported, model)
    spec, cache = dj.init_cache(model, tokens=length, page_size=16)
    pages = np.arange(spec.pages, dtype=np.int32)[None]
    step = StepOptions(page_size=16, logits="all", return_hidden=True)

    @jax.jit
    def theirs(loaded, cache, tokens, following):
        batch = StepBatch(tokens, np.array([0], np.int32), np.array([length], np.int32), pages)
        main, cache = dj.forward(model, loaded, cache, batch, spec=spec, opts=step)
        drafted, _ = model.forward_mtp(
            *(loaded, cache, batch._replace(tokens=following), main.hidden), spec=spec, opts=step
        )
        return main.logits, drafted.logits

    sparse, dense = ours(params, ids[None])
    expected = theirs(loaded, cache, ids[None, :-1], ids[None, 1:])
    for engine, long, short in zip(expected, sparse, dense, strict=True):
        assert np.std(engine) > 0.1
        np.testing.assert_allclose(long, engine, atol=1e-4)
        np.testing.assert_allclose(short, engine[:, :few], atol=1e-4)


@pytest.mark.parametrize("case", ["spread", "ties", "infinite"])
def test_mask_is_the_engines_selection(case: str):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 40, 300)).astype(np.float32)
    if case == "ties":
        scores = np.maximum(np.round(scores), 0)
    if case == "infinite":
        scores[rng.random(scores.shape) < 0.9] = -np.inf
    lengths = rng.integers(1, 301, (2, 40)).astype(np.int32)
    visible = np.arange(300) < lengths[..., None]
    mask = np.asarray(topk_mask(jnp.asarray(scores), jnp.asarray(visible), 32))
    best = local_topk(jnp.asarray(scores), jnp.asarray(lengths), 32)
    for b, t in np.ndindex(lengths.shape):
        expected = np.asarray(best.index[b, t])[: min(32, lengths[b, t])]
        assert set(np.flatnonzero(mask[b, t])) == set(expected)


def test_kth_key_and_its_score():
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((3, 50)), jnp.float32)
    found = score_of_key(kth_key(score_keys(scores), 7))
    np.testing.assert_array_equal(found, np.sort(scores, axis=-1)[:, -7])


def test_long_sequences_are_selected_in_segments(monkeypatch: pytest.MonkeyPatch):
    q, w, keys = (
        jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.float32)
        for i, shape in enumerate([(1, 64, 2, 8), (1, 64, 2), (1, 64, 8)])
    )
    whole = selection_mask(q, w, keys, 5)
    assert [b for b, _ in segments(8192)] == [0, 2048, 4096, 6144]
    monkeypatch.setattr("tiny_training.selection.segments", lambda n: [(0, 16), (16, 64)])
    np.testing.assert_array_equal(whole, selection_mask(q, w, keys, 5))
    assert (whole.sum(-1) == np.minimum(np.arange(64) + 1, 5)).all()
    random = selection_mask(q, w, keys, 5, seed=jax.random.key(0))
    assert (random.sum(-1) == whole.sum(-1)).all()
    assert (random != whole).any()


# Losses and optimiser


def test_margin_is_bounded_whatever_the_scores():
    """Raw scores of any size: the loss is at most MARGIN_NATS, its derivative at most 1 a row."""
    rng = np.random.default_rng(0)
    needles = jnp.zeros((1, 4), jnp.int32)
    loss = jax.jit(jax.value_and_grad(lambda s: margin_loss(s, needles, 8).sum()))
    for size in (1.0, 1e3, 1e6):
        scores = jnp.asarray(size * rng.standard_normal((1, 4, 100)), jnp.float32)
        value, slope = loss(scores)
        assert 0 <= value <= 4 * MARGIN_NATS
        assert np.abs(slope).sum(-1).max() <= 2
    far_above = scores.at[..., 0].set(1e8)
    assert margin_loss(far_above, needles, 8).max() == 0


def test_needle_rank_follows_the_total_order():
    scores = jnp.asarray([[[2.0, 5.0, 2.0, 2.0, -jnp.inf]]])
    for needle, rank in [(1, 0), (0, 1), (2, 2), (3, 3)]:
        assert needle_rank(scores, jnp.array([[needle]]))[0, 0] == rank


def test_losses_of_a_perfect_and_of_an_ignorant_model(cfg):
    batch = batch_of(replace(SPARSE, length=512, shortest=512), 0, 0, TEXT)
    tokens = batch.tokens.astype(int)
    rows, length = batch.rows, 512
    visible = np.arange(length) <= rows[..., None]
    even = visible / visible.sum(-1, keepdims=True)
    tap = Tap(jnp.where(visible, 0.0, -jnp.inf), jnp.asarray(even, jnp.float32))
    for knows in (True, False):
        logits = 30.0 * knows * np.eye(264, dtype=np.float32)[tokens]
        result = ForwardResult(
            jnp.asarray(logits[:, 1 : 1 + length]),
            (jnp.asarray(logits[:, 2 : 2 + length]),),
            {0: tap},
            {0: tap.target},
            {},
        )
        found = losses(result, batch, index_topk=24, margin_weight=0.0)
        assert found.metrics["indexer/0"] == pytest.approx(0, abs=1e-5)
        nll = 0 if knows else np.log(264)
        assert found.total == pytest.approx(2.4 * nll, abs=1e-3)
        real = batch.targets >= 0
        assert bool(found.correct[real].all()) == knows


def test_round_24_keeps_16_bits_of_mantissa():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
    rounded = np.asarray(round_24(x))
    assert (rounded.view(np.uint32) & 0xFF == 0).all()
    np.testing.assert_allclose(rounded, x, rtol=2**-16)


def test_gradients_are_clipped_by_group(params):
    norms = global_norms(params)
    squares = sum(float(n) ** 2 for n in norms.values())
    expected = sum(float((p**2).sum()) for p in jax.tree.leaves(params))
    assert squares == pytest.approx(expected, rel=1e-4)
    assert norms["indexer"] > 0


def test_balance_moves_the_bias_towards_idle_experts(cfg, params):
    loads = {layer: jnp.array([1.0, 0.5, 0.3, 0.2]) for layer in (1, 2, 3)}
    moved = balance(params, loads, 0.25)
    for one in (moved["layers"]["1"], moved["mtp"]["layer"]):
        old = params["layers"]["1"] if one is moved["layers"]["1"] else params["mtp"]["layer"]
        change = one["mlp"]["e_score_correction_bias"] - old["mlp"]["e_score_correction_bias"]
        np.testing.assert_allclose(change, [-0.25, 0.0, 0.25, 0.25], atol=1e-4)


@pytest.mark.slow
def test_indexers_learn_from_their_own_terms_only(cfg, params):
    """No derivative of text or answers reaches an indexer, none of the indexer's the rest."""
    batch = batch_of(DENSE, 0, 0, TEXT)
    tokens = batch.tokens[:, :129].astype(np.int32)

    def terms(p):
        result = forward(p, cfg, tokens, batch.rows, ForwardOptions(), FLOAT32)
        main = jax.nn.logsumexp(result.logits).sum() + result.draft_logits[0].sum()
        return main, sum(
            jnp.where(jnp.isfinite(t.scores), t.scores, 0).sum() for t in result.taps.values()
        )

    @jax.jit
    def norms(p):
        _, pull = jax.vjp(terms, p)
        return [global_norms(pull(ct)[0]) for ct in ((1.0, 0.0), (0.0, 1.0))]

    of_main, of_index = norms(params)
    assert of_main["indexer"] == 0
    assert of_main["main"] > 0
    assert of_index["main"] == 0
    assert of_index["indexer"] > 0


# State and loop


def test_state_survives_bit_by_bit(cfg, params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = init_state(params)
    noise = jax.tree.map(lambda p: (p * 1e-3).astype(jnp.bfloat16), first.params)
    first = first._replace(mean=noise, square=jax.tree.map(jnp.abs, noise), count=jnp.int32(12))
    monkeypatch.setattr(state, "_PART_BYTES", 100_000)
    save_state(tmp_path, init_state(params), {"stage": "before"})
    save_state(tmp_path, first, {"stage": "dense"})
    files = sorted(p.name for p in tmp_path.iterdir())
    assert len(files) > 2
    assert files[-1] == "state.json"
    assert all(name.startswith("state-12.") for name in files[:-1])
    again, progress = load_state(tmp_path, init_state(params))
    assert progress == {"stage": "dense"}
    jax.tree.map(np.testing.assert_array_equal, first, again)

    part = tmp_path / files[0]
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="damaged"):
        load_state(tmp_path, first)
    part.unlink()
    with pytest.raises(ValueError, match="lacks"):
        load_state(tmp_path, first)


def test_state_of_another_model_is_refused(params, tmp_path: Path):
    save_state(tmp_path, init_state({"w": jnp.ones((3, 4))}), {})
    with pytest.raises(ValueError, match="another model"):
        load_state(tmp_path, init_state(params))
    assert load_state(tmp_path / "empty", init_state(params)) is None


def test_the_whole_state_fits(tmp_path: Path):
    """The real model: below 20 MB of bfloat16, and a state of at most 5 parts below 15 MiB."""
    params = init_params(model_config(), seed=0)
    assert 2 * parameter_count(params) < 18e6
    noise = lambda p: jnp.asarray(np.random.default_rng(0).standard_normal(p.shape, np.float32))  # noqa: E731
    moments = jax.tree.map(lambda p: noise(p).astype(jnp.bfloat16), params)
    save_state(tmp_path, init_state(params)._replace(mean=moments, square=moments), {})
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert len(sizes) <= 6
    assert sum(sizes) < 56e6
    assert max(sizes) < 15 * 2**20


class Clock:
    """Time that passes by a second whenever someone looks."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def small():
    return model_config(**{**SMALL, **TWO_LAYERS})


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    assert train(directory, TEXT, small, (DENSE, SPARSE), dtype="float32", log_every=2, quiet=True)
    return directory


@pytest.mark.slow
def test_loss_falls_and_everything_is_logged(trained: Path):
    lines = [json.loads(line) for line in (trained / LOG_FILE).read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        *(("first", 2), ("first", 4), ("first", 6)),
        *(("second", 2), ("second", 4), ("second", 6)),
    ]
    assert lines[2]["bits_per_byte"] < lines[0]["bits_per_byte"] - 0.3
    assert all(line["loss"] < 40 for line in lines)
    for name in ("answer", "mtp/1", "mtp_accuracy/2", "gradient/main", "gradient/indexer"):
        assert name in lines[0]
    for layer in (0, 2):
        assert 0 <= lines[-1][f"indexer/{layer}"] < 5
        assert 0 <= lines[-1][f"recall/{layer}"] <= 1
    assert "mtp/2" not in lines[-1]
    assert set(lines[-1]["accuracy"]) <= {"keys", "passkey", "<=512"}


@pytest.mark.slow
def test_stopped_runs_go_on_bit_by_bit(
    small, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tiny_training.loop.time", Clock())
    calls = 0
    while not train(
        *(tmp_path, TEXT, small, (DENSE, SPARSE)), dtype="float32", seconds=8, quiet=True
    ):
        calls += 1
        assert calls < 10
    assert calls >= 2
    template = init_state(init_params(small, 0))
    (whole, _), (pieces, progress) = (load_state(d, template) for d in (trained, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)
    assert progress["step"] == 6
    assert progress["tokens"] == 6 * (DENSE.tokens + SPARSE.tokens)


@pytest.mark.slow
def test_evaluation(small):
    evaluator = Evaluator(init_params(small, 0), small, TEXT, dtype="float32")
    results = evaluate(
        *(evaluator,),
        lengths=(512,),
        depths=(0.5,),
        trials=2,
        text_length=256,
        written=(16, 8, 2),
    )
    assert results["left_out"] == []
    assert 1 <= results["mtp"]["tokens_per_step"] <= 4
    assert 5 < results["bits_per_byte"] < 20
    assert {cell["trials"] for cell in results["cells"]} == {2}
    assert set(results["cells"][0]["recall"]) == {0, 2}
    assert set(results["cells"][0]["mass"]) == {0, 1, 2}


def test_report_says_what_was_measured(tmp_path: Path):
    pytest.importorskip("matplotlib")
    line = {
        **{"stage": "first", "length": 128, "tokens": 10_000, "bits_per_byte": 2.5, "answer": None},
        **{"accuracy": {"<=1024": [0.5, 4]}, "step_seconds": 0.02, "recall/0": 0.75},
    }
    log = [{**line, "step": step, "tokens": 1000 * step} for step in (20, 40, 40)]
    log += [{**log[-1], "stage": "second", "tokens": 50_000, "accuracy": {}}]
    (tmp_path / LOG_FILE).write_text("".join(json.dumps(line) + "\n" for line in log))
    kind = {"depth": None, "needles": 8, "mode": "sparse", "hits": 3, "trials": 4}
    measured = {"recall": {"0": 1.0, "2": 0.5}, "mass": {"0": 0.25, "1": 0.5, "2": 0.0}}
    path = report(
        tmp_path,
        read_log(tmp_path / LOG_FILE),
        {
            "cells": [{"length": 1024, **kind, **measured}],
            "bits_per_byte": 1.5,
            "mtp": {"tokens_per_step": 1.75},
            "left_out": ["a cell"],
        },
        device="a test",
        sources={"python": 2_000_000},
        licences={"python": "PSF licence"},
        seconds=60,
        parameters=8_560_000,
    )
    text = path.read_text()
    for words in (
        *("| 8 named keys, any depth | 3/4 |", "| first | 40 | 128 | 2.500 | 0.500 | 20 |"),
        *("| 0 | 0.250 | 1.0000 |", "| 1 | 0.500 | shares the selection", "8.56 M", "1.5 bits"),
        *("1.75 tokens a step", "for want of time: a cell", "| python | 2.00 | PSF licence |"),
    ):
        assert words in text
    for plot in ("training.png", "accuracy.png", "recall.png"):
        assert (tmp_path / plot).stat().st_size > 1000


def test_evaluation_stops_in_time(small):
    evaluator = Evaluator(init_params(small, 0), small, TEXT, dtype="float32")
    results = evaluate(evaluator, seconds=-1)
    assert results["cells"] == []
    assert "mtp" in results["left_out"]


# Stages and export


def test_stages_can_be_shortened():
    changed = with_steps(STAGES, {"long": 7})
    assert [s.steps for s in changed if s.name == "long"] == [7]
    with pytest.raises(ValueError, match="fits no stage"):
        with_steps(STAGES, {"longer": 7})
    for stage in STAGES:
        assert stage.learning_rate(0) < stage.lr[0]
        assert stage.learning_rate(stage.steps - 1) == pytest.approx(stage.lr[1])


def test_export_holds_every_tensor(cfg, params, exported: Path):
    checkpoint = Checkpoint(exported)
    tensors = to_hf(params, cfg)
    assert set(tensors) == set(checkpoint)
    model = dj.Model(cfg, dj.make_mesh(), FLOAT32, with_mtp=True)
    loaded = dict(flatten(dj.load_params(exported, model)))
    for name, value in flatten(params):
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)


def test_tokenizer_takes_any_bytes(exported: Path):
    tokenizer = load_tokenizer(exported)
    assert tokenizer is not None
    text = "naïve\n\n\t\r 𝄞 <think>x</think><|eos|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.removesuffix("<|eos|>")
    assert tokenizer.encode("ab") == [BOS, 97, 98]
    assert tokenizer.encode("") == [BOS]
    assert [tokenizer.token_bytes(b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert tokenizer.special_token_ids == frozenset({256, 257, 258, 259, 260})
    # Characters arrive byte by byte, and bytes that are none.
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.add(i) for i in [*"é𝄞".encode(), 0xFF, 0x41]] + [stream.flush()]
    assert pieces == ["", "é", "", "", "", "𝄞", "�", "A", ""]
    assert byte_tokenizer().get_vocab_size() == 264


def test_chat_template(exported: Path):
    from dcp_jax.chat.template import load_chat_template, render_chat

    messages = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "That."},
        {"role": "user", "content": "Why?"},
    ]
    text = render_chat(messages, template=load_chat_template(exported), model_type="glm_moe_dsa")
    assert text == "<|bos|><|user|>What?<|assistant|>That.<|eos|><|user|>Why?<|assistant|>"


def test_corpus_holds_out_the_end_of_each_text(tmp_path: Path):
    corpus = Corpus.of({"a": b"x" * 1000, "b": b"y" * 500})
    corpus.save(tmp_path / "corpus.npz")
    again = Corpus.load(tmp_path / "corpus.npz")
    assert bytes(again.held_out) == b"x" * 40 + b"y" * 20
    assert len(again.train) == 1440
    assert again.sources == {"a": 1000, "b": 500}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--dir", "{tmp}", "--corpus", "none", "--steps", "long"], "is not STAGE=N"),
        (["train", "--dir", "{tmp}", "--corpus", "none", "--steps", "x=1"], "fits no stage"),
        (["export", "--dir", "{tmp}", "{tmp}/out"], "no training state"),
        (["corpus", "{tmp}/out.npz", "--archives", "{tmp}"], "make train-corpus"),
    ],
)
def test_command_line_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from train_tiny_dsa import main

    assert main([a.replace("{tmp}", str(tmp_path)) for a in arguments]) == 2
    assert message in caplog.text
