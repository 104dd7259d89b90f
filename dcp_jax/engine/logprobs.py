"""Log-probabilities for the caller, from what the devices return."""

from typing import Any

import numpy as np

from dcp_jax.engine.outputs import Logprob, Logprobs
from dcp_jax.engine.sampler import Sampled

# Prompt tokens scored per step: bounds the logits held at a time (V = 155k: 159 MB).
SCORED_CHUNK = 256


def token_logprobs(sampled: Sampled, step: int, row: int, count: int) -> Logprobs:
    """The drawn token's entry and those of the `count` most likely tokens, best first."""
    tokens, own, ranks, top_tokens, top = (np.asarray(leaf)[step, row] for leaf in sampled)
    best = {
        int(token): Logprob(float(value), rank)
        for rank, (token, value) in enumerate(zip(top_tokens[:count], top[:count], strict=True), 1)
    }
    return best | {int(tokens): Logprob(float(own), int(ranks))}


def prompt_logprobs(chunk: Any, prompt: list[int], count: int) -> list[Logprobs]:
    """Entries of the prompt's tokens that this chunk predicts: start+1 .. start+length."""
    last = min(chunk.start + chunk.length, len(prompt) - 1)
    logprobs = log_softmax(chunk.result.logits[0, : last - chunk.start])
    entries = []
    for values, token in zip(logprobs, prompt[chunk.start + 1 : last + 1], strict=True):
        order = np.argsort(-values, kind="stable")[:count]
        best = {int(t): Logprob(float(values[t]), rank) for rank, t in enumerate(order, 1)}
        own = Logprob(float(values[token]), 1 + int((values > values[token]).sum()))
        entries.append(best | {token: own})
    return entries


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32 log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
