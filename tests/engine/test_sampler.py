"""The device sampler against a numpy oracle: distributions by chi-squared, edits by value."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from dcp_jax.engine.sampler import SamplerOptions, SamplingBatch, sample, sample_step
from dcp_jax.mesh import make_mesh

VOCAB, DRAWS = 24, 20_000
LOGITS = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 2
LOGITS[5] = LOGITS[9]  # a tie: the lower id comes first


def batch_of(rows: int, **values) -> SamplingBatch:
    defaults = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "position": 7}
    defaults |= {"repetition": 1, "presence": 0, "frequency": 0}
    floats = {"temperature", "top_p", "min_p", "repetition", "presence", "frequency"}
    columns = {
        name: np.full(rows, values.pop(name, value), np.float32 if name in floats else np.int32)
        for name, value in defaults.items()
    }
    nothing = np.zeros((rows, 0), np.int32)
    return SamplingBatch(
        **columns,
        seed=values.pop("seed", np.arange(rows, dtype=np.uint32)),
        in_prompt=values.pop("in_prompt", nothing.astype(bool)),
        generated=values.pop("generated", nothing),
        edit_ids=(ids := values.pop("edit_ids", nothing)),
        edit_values=values.pop("edit_values", nothing.astype(np.float32)),
        edit_until=values.pop("edit_until", np.full(ids.shape, 99, np.int32)),
    )


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities after the filters, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    keep = p >= min_p * p.max()
    if top_k:
        keep &= np.isin(np.arange(len(p)), order[:top_k])
    p = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[(before >= top_p) & (np.arange(len(p)) > 0)]] = 0
    return p / p.sum()


@dataclass(frozen=True)
class Case:
    id: str
    filters: dict = field(default_factory=dict)
    wrong: dict = field(default_factory=dict)  # a filter that the draws must contradict


CASES = [
    Case("plain", {}, {"temperature": 1.1}),
    Case("temperature-cold", {"temperature": 0.5}, {"temperature": 0.55}),
    Case("temperature-hot", {"temperature": 2.0}, {"temperature": 1.8}),
    Case("top-k-1", {"top_k": 1}, {"top_k": 2}),
    Case("top-k", {"top_k": 5}, {"top_k": 6}),
    Case("top-k-beyond", {"top_k": 99}, {"top_k": 8}),
    Case("top-p", {"top_p": 0.7}, {"top_p": 0.8}),
    Case("top-p-tiny", {"top_p": 0.01}, {"top_p": 0.6}),
    Case("min-p", {"min_p": 0.1}, {"min_p": 0.3}),
    Case("all", {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.02}, {"top_k": 9}),
    # top-p counts the mass of what top-k keeps, not of everything
    Case("top-p-after-top-k", {"top_k": 4, "top_p": 0.75}, {"top_p": 0.75}),
]


def rejects(counts: np.ndarray, p: np.ndarray) -> bool:
    """Whether the draws contradict the distribution (p < 1e-3)."""
    if counts[p == 0].any():
        return True
    seen = p > 0
    return bool(seen.sum() > 1 and chisquare(counts[seen], p[seen] * DRAWS).pvalue < 1e-3)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_draws_follow_the_filtered_distribution(case):
    draw = jax.jit(sample, static_argnums=2)
    logits = jnp.broadcast_to(LOGITS, (DRAWS, VOCAB))
    tokens = draw(logits, batch_of(DRAWS, **case.filters), SamplerOptions(filters=True)).tokens
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert not rejects(counts, oracle(LOGITS, **case.filters))
    assert rejects(counts, oracle(LOGITS, **case.wrong))


def test_a_row_depends_on_its_seed_and_position_alone():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(8, VOCAB)), jnp.float32)
    batch = batch_of(8, seed=rng.integers(2**32, size=8, dtype=np.uint32))
    opts = SamplerOptions(filters=True)
    together = np.asarray(sample(logits, batch, opts).tokens)
    for row in range(8):
        alone = jax.tree.map(lambda a, row=row: a[row : row + 1], batch)
        assert sample(logits[row : row + 1], alone, opts).tokens[0] == together[row]
    # other positions draw other noise, the same seed and position the same
    flat = jnp.zeros((64, VOCAB))
    moved = [
        sample(flat, batch_of(64, seed=np.full(64, 3, np.uint32), position=p), opts).tokens
        for p in range(12)
    ]
    assert all(len(set(np.asarray(tokens).tolist())) == 1 for tokens in moved)
    assert len({int(tokens[0]) for tokens in moved}) > 3


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits = jnp.broadcast_to(LOGITS, (3, VOCAB))
    batch = batch_of(3)._replace(temperature=np.array([0, 1, 0], np.float32))
    tokens = sample(logits, batch, SamplerOptions(filters=True)).tokens
    assert int(tokens[0]) == int(tokens[2]) == LOGITS.argmax()


def test_edits_add_and_ban():
    logits = jnp.broadcast_to(LOGITS, (3, VOCAB))
    best = int(LOGITS.argmax())
    batch = batch_of(
        3,
        temperature=0,
        edit_ids=np.array([[best, -1], [4, 3], [-1, -1]], np.int32),
        edit_values=np.array([[-np.inf, 0], [50, 60], [9, 9]], np.float32),
    )
    tokens = sample(logits, batch, SamplerOptions(edits=True)).tokens
    assert tokens.tolist() == [int(np.argsort(-LOGITS)[1]), 3, best]
    # the draw is for position 7: an edit until 7 is over, one until 8 is not
    for until, expected in ((7, best), (8, int(np.argsort(-LOGITS)[1]))):
        late = batch._replace(edit_until=np.full((3, 2), until, np.int32))
        assert int(sample(logits, late, SamplerOptions(edits=True)).tokens[0]) == expected


def test_penalties_by_value(monkeypatch):
    """One prompt token, one generated twice, one in both; against vLLM's formulas in numpy."""
    in_prompt, generated = np.zeros((1, VOCAB), bool), np.zeros((1, VOCAB), np.int32)
    in_prompt[0, 2], generated[0, 7], generated[0, 2] = True, 2, 1
    batch = batch_of(
        1,
        temperature=0,
        repetition=1.7,
        presence=0.5,
        frequency=0.25,
        in_prompt=in_prompt,
        generated=generated,
    )
    want = LOGITS.copy()
    for token in (2, 7):
        want[token] = want[token] / 1.7 if want[token] > 0 else want[token] * 1.7
    want[7] -= 0.25 * 2 + 0.5
    want[2] -= 0.25 * 1 + 0.5
    seen = {}
    monkeypatch.setattr(jnp, "argmax", lambda x, axis: seen.setdefault("logits", x)[:, 0] * 0)
    sample(jnp.asarray(LOGITS)[None], batch, SamplerOptions(penalties=True))
    np.testing.assert_allclose(seen["logits"][0], want, rtol=1e-6)


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (4, 2), (3, 3)])
def test_sharded_logits_give_the_same_tokens_and_logprobs(tp, dcp):
    """Padding tokens (-inf at the end) are neither drawn nor counted."""
    mesh = make_mesh(tp, dcp)
    padded = -(-VOCAB // tp) * tp
    logits = np.full((4, padded), -np.inf, np.float32)
    logits[:, :VOCAB] = np.random.default_rng(2).normal(size=(4, VOCAB))
    batch, opts = batch_of(4, top_p=0.9), SamplerOptions(filters=True, top_logprobs=5)
    got = jax.jit(lambda x: sample_step(x, batch, mesh, VOCAB, opts))(jnp.asarray(logits))
    want = sample(jnp.asarray(logits[:, :VOCAB]), batch, opts)
    assert got.tokens.tolist() == want.tokens.tolist()
    wide = logits[:, :VOCAB].astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    tokens = np.asarray(got.tokens)
    np.testing.assert_allclose(got.logprobs, logprobs[np.arange(4), tokens], atol=1e-6)
    ranks = 1 + (logprobs > logprobs[np.arange(4), tokens][:, None]).sum(-1)
    assert got.ranks.tolist() == ranks.tolist()
    np.testing.assert_array_equal(got.top_tokens, np.argsort(-logprobs, kind="stable")[:, :5])
