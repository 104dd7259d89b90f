"""The NextN layer against the golden case with one: logits, hidden states, selections, drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dcp_jax.engine.runner import Row, Runner
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import Sequence, cached_rows, deal, open_runner, selected_sets

pytestmark = pytest.mark.slow

MTP_LAYER = 3
OWNED, GATHERED = PrefillPath.OWNED, PrefillPath.GATHERED


@dataclass(frozen=True)
class Case:
    id: str
    tp: int
    dcp: int
    path: PrefillPath
    index_cache: str = "sharded"
    dcp_comm: str = "a2a"
    page_size: int = 4


CASES = [
    Case("3_3_owned", 3, 3, OWNED),
    Case("8_4_gathered", 8, 4, GATHERED, page_size=16),
    Case("8_8_replicated_ag_rs", 8, 8, OWNED, "replicated", "ag_rs"),
]


def rows_of_layers(runner: Runner, sequences: list[Sequence]) -> list[bytes]:
    """What the caches hold of the main model's layers."""
    for sequence in sequences:
        sequence.cached = len(sequence.tokens)
    return [
        cached_rows(runner, sequence, leaf, layer).tobytes()
        for sequence in sequences
        for leaf in ("latent", "k_pe", "index_k")
        for layer in range(MTP_LAYER)
    ]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_golden_mtp(golden: Callable[[str], Any], case: Case):
    """One batch of the scored text and the greedy prompt, then drafts chained on the prompt."""
    arrays = golden("p4").arrays
    runner = open_runner(
        golden("p4").path,
        tp=case.tp,
        dcp_size=case.dcp,
        tokens=640,
        page_size=case.page_size,
        with_mtp=True,
        path=case.path,
        index_cache=case.index_cache,
        dcp_comm=case.dcp_comm,
    )
    text, prompt = arrays["input_ids"][0].tolist(), arrays["greedy_prompt"].tolist()
    sequences = deal(runner, [text, prompt], room=4, seed=case.dcp)
    width = max(len(s.pages) for s in sequences)
    main = runner.step(
        [Row(s.tokens, 0, s.pages) for s in sequences], table_width=width, return_hidden=True
    )
    first = main.next_tokens[1]
    assert first == arrays["mtp_draft_first_token"]

    main_rows = rows_of_layers(runner, sequences)

    # Pair i holds hidden state i and token i + 1.
    pairs = [text[1:], [*prompt[1:], first]]
    mtp = runner.step_mtp(
        [Row(tokens, 0, s.pages) for tokens, s in zip(pairs, sequences, strict=True)],
        main.hidden,
        table_width=width,
        return_hidden=True,
        logits="all",
        explain=True,
    )
    valid = int(arrays["mtp_valid"].sum())
    assert valid == len(text) - 1
    hidden = np.asarray(mtp.hidden)
    for got, name in ((mtp.logits[0], "mtp_logits"), (hidden[0], "mtp_hidden")):
        np.testing.assert_allclose(got[:valid], arrays[name][0, :valid], atol=2e-4)
    for token in range(valid):
        wanted = set(arrays["mtp_topk_indices"][0, token].tolist()) - {-1}
        shares = selected_sets(mtp.explanation, MTP_LAYER, 0, token)
        assert set().union(*shares) == wanted
        assert sum(map(len, shares)) == len(wanted)

    # Drafts: the last pair's output is the hidden state of the next pair.
    last = len(prompt) - 1
    drafts, logits = [mtp.next_tokens[1]], [mtp.logits[1, last]]
    state = mtp.hidden[1:2, last : last + 1]
    while len(drafts) < 3:
        row = Row(drafts[-1:], len(prompt) + len(drafts) - 1, sequences[1].pages)
        step = runner.step_mtp(
            [row], state, table_width=width, return_hidden=True, logits="last", path=OWNED
        )
        drafts += step.next_tokens
        logits.append(step.logits[0, 0])
        state = step.hidden
    assert drafts == arrays["mtp_draft_noshare_tokens"].tolist()
    np.testing.assert_allclose(logits, arrays["mtp_draft_noshare_logits"], atol=2e-4)

    # The layer has regions of its own in both caches: the main model's rows are untouched.
    assert rows_of_layers(runner, sequences) == main_rows
    sequences[1].cached = len(prompt) + 2
    for leaf, region in (("latent", MTP_LAYER), ("index_k", MTP_LAYER)):
        drafted = cached_rows(runner, sequences[1], leaf, region)
        assert np.abs(drafted).max(axis=1).all(), "every pair was written, the drafts' too"
