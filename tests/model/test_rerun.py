"""Pruned candidates that miss a key are noticed, and the step runs again in full width.

The checkpoint's indexer prefers tokens of the upper half of the vocabulary: a text that has them at
every W-th place only puts all winners on one rank, which no pruned exchange can carry.
"""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from dcp_jax.cache.pool import init_cache
from dcp_jax.engine.runner import Runner
from dcp_jax.testing.checkpoints import random_tensors
from dcp_jax.testing.harness import advance, deal, selected_sets, tiny_config

W, K, VOCAB, LENGTH = 4, 64, 512, 320
WINNERS_AT = 1  # positions = 1 mod W


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preferring")
    config = tiny_config(
        index_topk=K,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        indexer_types=["full", "shared"],
        mlp_layer_types=["dense", "sparse"],
    )
    tensors = random_tensors({**config, "dtype": "float32"}, seed=3)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 4  # the same for all tokens: makes head weights and a query channel positive
    embedding[:, 1] = np.where(np.arange(VOCAB) < VOCAB // 2, -4, 4)
    attention = "model.layers.0.self_attn."
    tensors[attention + "q_a_proj.weight"][0] = np.eye(1, 32, 0)
    head_weights = tensors[attention + "indexer.weights_proj.weight"]
    head_weights[:] = np.eye(1, 32, 0)
    tensors[attention + "indexer.wq_b.weight"].reshape(4, 16, 24)[:, -1, 0] = 8
    tensors[attention + "indexer.wk.weight"][-1] = 3 * np.eye(1, 32, 1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return path


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    rng = np.random.default_rng(5)
    low, high = rng.integers(2, VOCAB // 2, LENGTH), rng.integers(VOCAB // 2, VOCAB, LENGTH)
    periodic = np.where(np.arange(LENGTH) % W == WINNERS_AT, high, low)
    return {"random": rng.integers(2, VOCAB, LENGTH).tolist(), "periodic": periodic.tolist()}


@pytest.fixture(scope="module")
def open_w(runners: Callable[..., Runner], directory: Path):
    sizes = {"tokens": 336, "largest_step": LENGTH}
    return lambda ranks: runners(directory, tp=ranks, dcp_size=ranks, explain=True, **sizes)


def run(runner: Runner, text: list[int], steps: int = 3, **changes):
    """Prefill and greedy decode from empty caches: tokens, selected sets, owned counts, reruns."""
    runner.cache = init_cache(runner.spec, runner.model.mesh)
    (sequence,) = deal(runner, [text], room=steps)
    sets, counts, reruns = [], [], []
    for _ in range(1 + steps):
        new = len(sequence.tokens) - sequence.cached
        result = advance(runner, [sequence], **changes)
        for token in range(new):
            shares = selected_sets(result.explanation, 0, 0, token)
            sets.append(set().union(*shares))
            counts.append([len(share) for share in shares])
        reruns.append(result.reruns)
    return sequence.tokens, sets, np.array(counts), reruns


def cache_bytes(runner: Runner) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(runner.cache)]


@pytest.fixture(scope="module")
def reference(open_w, texts):
    """Tokens and selected sets of one rank."""
    return {name: run(open_w(1), text)[:2] for name, text in texts.items()}


def test_random_text_needs_no_rerun(open_w, texts, reference):
    runner = open_w(W)
    before = runner.reruns
    tokens, sets, counts, reruns = run(runner, texts["random"])
    assert (tokens, sets) == reference["random"]
    assert reruns == [0] * 4
    assert runner.reruns == before
    assert (counts.sum(axis=1) == [min(K, n + 1) for n in range(LENGTH + 3)]).all()


def test_all_winners_on_one_rank(open_w, texts, reference):
    """The certificate fails in prefill and in every decode step, and the rerun is right."""
    runner = open_w(W)
    before = runner.reruns
    tokens, sets, counts, reruns = run(runner, texts["periodic"])
    assert counts[LENGTH - 1].tolist() == [0, K, 0, 0]
    assert reruns == [1] * 4
    assert runner.reruns == before + 4
    assert (tokens, sets) == reference["periodic"]


@pytest.mark.parametrize("name", ["random", "periodic"])
def test_rerun_leaves_the_caches_of_a_full_width_run(open_w, texts, reference, name: str):
    """With 8 candidates of 64 the first run of every step writes wrong rows in layer 1."""
    runner = open_w(W)
    full = run(runner, texts[name], candidates="full")
    assert full[-1] == [0] * 4
    wanted = cache_bytes(runner)
    tokens, sets, _, reruns = run(runner, texts[name], candidates=8)
    assert reruns == [1] * 4
    assert (tokens, sets) == full[:2] == reference[name]
    assert cache_bytes(runner) == wanted


def test_a_rerun_is_counted_in_the_bytes(open_w, texts):
    """What the step received is both runs' exchange."""
    runner = open_w(W)
    (sequence,) = deal(runner, [texts["periodic"]], room=3)
    advance(runner, [sequence])
    rerun = advance(runner, [sequence])
    full = advance(runner, [sequence], candidates="full")
    assert (rerun.reruns, full.reruns) == (1, 0)
    # 6 bytes a candidate from 3 other ranks; pruned are ceil(64/4 + 8 sqrt(64 * 3) / 4) = 44.
    assert full.received_bytes["candidates"] == 3 * 6 * K
    assert rerun.received_bytes["candidates"] == 3 * 6 * (K + 44)
