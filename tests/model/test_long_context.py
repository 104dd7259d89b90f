"""Contexts across every boundary select and say the same for every W, on every path, in float32.

Prompts of 126 to 320 tokens at index_topk 128 and pages of 4 rows: decode walks over index_topk,
twice that, ends of pages and of buckets, and rows that hold more than one rank could.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dcp_jax.engine.runner import Runner, StepResult
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import Sequence as Tokens
from dcp_jax.testing.harness import advance, deal, selected_sets

K = 128
LENGTHS = (126, 254, 320)
DECODE_STEPS = 5  # 127 to 131, 255 to 259, 321 to 325 visible keys
ROOM = 8
FULL_LAYERS = (0, 2)
OWNED, GATHERED = PrefillPath.OWNED, PrefillPath.GATHERED
RANKS = (2, 3, 4, 8)
# (layer, row) -> the selected positions of each new token
Selected = dict[tuple[int, int], list[set[int]]]
# Gathered keys at a time: less than a page of all ranks, odd, several, and everything.
CHUNK_TOKENS = {2: 32768, 3: 100, 4: 64, 8: 32768}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(2, 64, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def open_w(checkpoint: Callable[..., Path], runners: Callable[..., Runner]):
    """A runner of W ranks with a pool that six prompts fill at W = 8."""
    directory = checkpoint(index_topk=K)
    sizes = {"tokens": 1600, "largest_step": max(LENGTHS)}
    return lambda W: runners(directory, tp=W, dcp_size=W, explain=True, **sizes)


def selections(result: StepResult, counts: Sequence[int]) -> Selected:
    """The selected positions of every new token; the ranks' shares do not overlap."""
    found = {}
    for layer in FULL_LAYERS:
        for row, count in enumerate(counts):
            found[layer, row] = []
            for token in range(count):
                shares = selected_sets(result.explanation, layer, row, token)
                assert all(p % len(shares) == rank for rank, s in enumerate(shares) for p in s)
                found[layer, row].append(set().union(*shares))
    return found


def generate(runner: Runner, sequences: list[Tokens]) -> list[Selected]:
    """Greedy decode, with the selections of every step."""
    found = []
    for _ in range(DECODE_STEPS):
        visible = [len(s.tokens) for s in sequences]
        found.append(selections(advance(runner, sequences), [1] * len(sequences)))
        for (_, row), (selected,) in found[-1].items():
            assert len(selected) == min(K, visible[row])
    return found


@pytest.fixture(scope="module")
def reference(open_w, prompts):
    """W = 1: selections of the prefill and of decode, and the sequences with their tokens."""
    runner = open_w(1)
    sequences = deal(runner, prompts, room=ROOM, seed=None)
    prefill = selections(advance(runner, sequences), LENGTHS)
    for selected in prefill.values():
        assert list(map(len, selected)) == [min(K, t + 1) for t in range(len(selected))]
    decode = generate(runner, sequences)
    return prefill, decode, [s.tokens for s in sequences]


@pytest.mark.slow
@pytest.mark.parametrize("W", RANKS)
@pytest.mark.parametrize("path", [OWNED, GATHERED])
def test_selections_and_tokens_equal_one_rank(open_w, prompts, reference, W: int, path):
    prefill, decode, tokens = reference
    runner = open_w(W)
    sequences = deal(runner, prompts, room=ROOM, seed=W)
    options = {"path": path, "gather_chunk_tokens": CHUNK_TOKENS[W]}
    result = advance(runner, sequences, **options)
    assert result.reruns == 0, "random text fits the pruned candidates"
    assert selections(result, LENGTHS) == prefill
    assert generate(runner, sequences) == decode
    assert [s.tokens for s in sequences] == tokens


@pytest.mark.parametrize("W", [2, 8])
@pytest.mark.parametrize("path", [OWNED, GATHERED])
def test_chunked_prefill_equals_one_shot(open_w, prompts, reference, W: int, path):
    """A prefix, then the rest of the prompt; beside it, whole prompts in the same batches."""
    prefill, _, tokens = reference
    runner = open_w(W)
    options = {"path": path, "gather_chunk_tokens": CHUNK_TOKENS[W]}
    *chunked, first, second = deal(runner, [*prompts, prompts[2]], room=ROOM, seed=W)
    cuts = [97, 129, 0]
    advance(runner, [*chunked, first], [*cuts[:2], 320], **options)
    result = advance(runner, [*chunked, second], **options)
    rests = [n - cut for n, cut in zip(LENGTHS, cuts, strict=True)]
    expected = {(layer, row): sets[cuts[row] :] for (layer, row), sets in prefill.items()}
    assert selections(result, rests) == expected
    for sequence, n, whole in zip([*chunked, second], LENGTHS, tokens, strict=True):
        assert sequence.tokens == whole[: n + 1]


@pytest.mark.parametrize("W", [2, 8])
def test_pool_is_used_beyond_one_ranks_rows(open_w, prompts, reference, W: int):
    """Slots past a rank's rows are real: what stands there neither gets lost nor hurts others."""
    _, decode, tokens = reference
    runner = open_w(W)
    rows = runner.spec.rows
    assert W == 2 or rows < max(LENGTHS), "one request is longer than a rank's pool"
    both = deal(runner, prompts * 2, room=ROOM, seed=None)
    early, late = both[:3], both[3:]
    assert max(late[-1].pages) * 4 * W >= rows
    advance(runner, early)
    advance(runner, late)
    assert generate(runner, early) == decode
    again = [Tokens(list(p), s.pages) for p, s in zip(prompts, early, strict=True)]
    advance(runner, again)
    assert generate(runner, again) == decode
    assert generate(runner, late) == decode
    assert [s.tokens for s in (*again, *late)] == tokens * 2


def test_a_row_without_pages_is_refused(open_w):
    """Its tokens would be dropped from the caches without a word."""
    runner = open_w(2)
    (sequence,) = deal(runner, [[2] * 16])
    sequence.tokens += [3]
    with pytest.raises(ValueError, match="17 tokens has 2 pages but needs 3"):
        advance(runner, [sequence])
