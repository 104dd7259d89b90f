"""What is minimised, and what is measured along with it.

    text + answer + MTP_WEIGHT (the same for the MTP layer's guesses)
      + sum over indexers of KL(attention || softmax of the scores) + margin

Text and answers are means of their own: a handful of answer bytes in 32,768 would not be heard in
one mean over all. The indexer's terms reach nothing but the indexer, whose inputs are constants.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.topk import score_keys
from tiny_training.documents import ANSWER, FILLER, TEXT, Batch
from tiny_training.model import ForwardResult, Tap
from tiny_training.selection import kth_key, score_of_key

FILLER_WEIGHT = 0.25  # of filler beside text: it is text too, with holes
MTP_WEIGHT = 0.2
MARGIN_NATS = 2.0
_BITS = 1.4426950408889634  # per nat


class Losses(NamedTuple):
    """`total` is differentiated; `metrics` are scalars; `correct` says which answers are right."""

    total: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]
    correct: Bool[Array, "B A"]


def losses(result: ForwardResult, batch: Batch, *, index_topk: int, margin_weight: float) -> Losses:
    """All terms of one batch."""
    length = result.logits.shape[1]
    tokens, kinds = batch.tokens.astype(jnp.int32), batch.kinds
    text, answer, bits = _token_loss(result.logits, tokens, kinds, ahead=1)
    total = text + answer
    metrics = {
        "bits_per_byte": _or_nan(bits, kinds == TEXT),
        "answer": _or_nan(answer, kinds == ANSWER),
    }

    for draft, logits in enumerate(result.draft_logits, start=1):
        draft_text, draft_answer, _ = _token_loss(logits, tokens, kinds, ahead=1 + draft)
        total += MTP_WEIGHT * (draft_text + draft_answer) / len(result.draft_logits)
        metrics[f"mtp/{draft}"] = draft_text
        target = tokens[:, 1 + draft : 1 + draft + length]
        metrics[f"mtp_accuracy/{draft}"] = jnp.mean(jnp.argmax(logits, -1) == target)

    labelled = batch.needles >= 0
    for layer, tap in result.taps.items():
        kl = _kl(tap)
        margin = _masked_mean(margin_loss(tap.scores, batch.needles, index_topk // 2), labelled)
        total += kl + margin_weight * margin
        metrics[f"indexer/{layer}"] = kl
        metrics[f"margin/{layer}"] = _or_nan(margin, labelled)
        found = needle_rank(tap.scores, batch.needles) < index_topk
        metrics[f"recall/{layer}"] = _or_nan(_masked_mean(found, labelled), labelled)
    for layer, probabilities in result.attention.items():
        mass = _masked_mean(at_needle(probabilities, batch.needles), labelled)
        metrics[f"mass/{layer}"] = _or_nan(mass, labelled)
    for layer, load in result.loads.items():
        metrics[f"load/{layer}"] = jnp.max(load) / jnp.mean(load)

    asked = jnp.maximum(batch.targets, 1)
    guess = jnp.take_along_axis(jnp.argmax(result.logits, -1), asked - 1, axis=1)
    correct = guess == jnp.take_along_axis(tokens, asked, axis=1)
    return Losses(total, {"loss": total, **metrics}, correct)


def _token_loss(logits, tokens, kinds, ahead) -> tuple[Array, Array, Array]:
    """Cross-entropies in nats of text with filler and of answers; bits per byte of text alone."""
    length = logits.shape[1]
    target, kind = (x[:, ahead : ahead + length] for x in (tokens, kinds))
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
    weight = jnp.where(kind == FILLER, FILLER_WEIGHT, (kind == TEXT).astype(jnp.float32))
    return (
        _masked_mean(nll, weight),
        _masked_mean(nll, kind == ANSWER),
        _masked_mean(nll, kind == TEXT) * _BITS,
    )


def _kl(tap: Tap) -> Float[Array, ""]:
    """Mean over rows of KL(target || softmax(scores)), in nats."""
    visible = jnp.isfinite(tap.scores)
    log_q = jnp.where(visible, _log_softmax(tap.scores), 0.0)
    p = tap.target
    return jnp.mean(jnp.sum(p * (jnp.log(jnp.maximum(p, 1e-30)) - log_q), axis=-1))


def margin_loss(
    scores: Float[Array, "B R T"], needles: Int[Array, "B R"], place: int
) -> Float[Array, "B R"]:
    """How far, in nats, the needle's log-probability is from MARGIN_NATS above the place-th's.

    Bounded by MARGIN_NATS, with a derivative that vanishes for a needle far below (the divergence
    is in charge there): a term linear in raw scores drove the scores to infinity in a trial.
    """
    scores = jnp.where(jnp.isfinite(scores), scores, -1e9)
    cut = score_of_key(kth_key(score_keys(jax.lax.stop_gradient(scores)), place))
    log_q = _log_softmax(scores)
    log_z = jax.nn.logsumexp(jax.lax.stop_gradient(scores), axis=-1)
    gap = at_needle(log_q, needles) - (cut - log_z)
    return MARGIN_NATS * jnp.tanh(jax.nn.relu(MARGIN_NATS - gap) / MARGIN_NATS)


def needle_rank(scores: Float[Array, "B R T"], needles: Int[Array, "B R"]) -> Int[Array, "B R"]:
    """How many keys stand before the needle's in the total order of the selection."""
    own = at_needle(scores, needles)[..., None]
    earlier = jnp.arange(scores.shape[-1]) < needles[..., None]
    return jnp.sum((scores > own) | ((scores == own) & earlier), axis=-1)


def at_needle(values: Float[Array, "B R T"], needles: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """The value at each row's needle (at position 0 where there is none)."""
    return jnp.take_along_axis(values, jnp.maximum(needles, 0)[..., None], axis=-1)[..., 0]


def _log_softmax(scores):
    return scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def _or_nan(value, there):
    """For the log: a mean over nothing is no number."""
    return jnp.where(jnp.any(there), value, jnp.nan)


def _masked_mean(values, weight):
    return jnp.sum(values * weight) / jnp.maximum(jnp.sum(weight), 1e-9)
