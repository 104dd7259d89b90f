"""Prompts for benchmarks, made from a seed: nothing is downloaded. Plain Python: no jax.

A workload is a list of conversations; each turn sends what was said before (with the model's own
answers), then its new tokens.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Name = Literal["random", "passkey", "multi-turn"]

# Token ids below this are special in most vocabularies.
_FIRST = 16
_KEY_TOKENS = 5


@dataclass(frozen=True)
class Turn:
    """New tokens of the user, how long the answer is, and the answer that is expected, if any."""

    tokens: list[int]
    output_len: int
    expected: list[int] | None = None


Conversation = list[Turn]


def random_prompts(
    vocab_size: int, *, num_prompts: int, input_len: int, output_len: int, seed: int = 0
) -> list[Conversation]:
    """Prompts of uniformly random tokens."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(min(_FIRST, vocab_size - 1), vocab_size, (num_prompts, input_len))
    return [[Turn(prompt, output_len)] for prompt in prompts.tolist()]


def passkey_prompts(
    vocab_size: int, *, num_prompts: int, input_len: int, output_len: int, seed: int = 0
) -> list[Conversation]:
    """A key hidden at a random depth of a repeated filler, asked for at the end.

    The prompt is `filler, marker, key, filler, marker`, and the key should follow.
    """
    rng = np.random.default_rng(seed)
    if input_len < _KEY_TOKENS + 3:
        raise ValueError(
            f"input_len={input_len} does not hold a key of {_KEY_TOKENS} tokens and its two "
            f"markers: give at least {_KEY_TOKENS + 3}."
        )
    first = min(_FIRST, vocab_size - 1)
    conversations = []
    for _ in range(num_prompts):
        marker, *sentence = rng.integers(first, vocab_size, 1 + 12).tolist()
        key = rng.integers(first, vocab_size, _KEY_TOKENS).tolist()
        length = input_len - _KEY_TOKENS - 2
        filler = (sentence * (length // len(sentence) + 1))[:length]
        depth = int(rng.integers(0, length + 1))
        prompt = [*filler[:depth], marker, *key, *filler[depth:], marker]
        conversations.append([Turn(prompt, output_len, key)])
    return conversations


def multi_turn(
    vocab_size: int,
    *,
    num_prompts: int = 16,
    turns: int = 5,
    input_len: int,
    output_len: int,
    seed: int = 0,
) -> list[Conversation]:
    """Conversations of several turns: what came before is in the prefix cache."""
    rng = np.random.default_rng(seed)
    first = min(_FIRST, vocab_size - 1)
    drawn = rng.integers(first, vocab_size, (num_prompts, turns, input_len)).tolist()
    return [[Turn(tokens, output_len) for tokens in conversation] for conversation in drawn]


def workload(
    name: Name,
    vocab_size: int,
    *,
    num_prompts: int,
    turns: int,
    input_len: int,
    output_len: int,
    seed: int,
) -> list[Conversation]:
    """The workload of a name; `turns` is for multi-turn only."""
    sizes = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    if name == "multi-turn":
        return multi_turn(vocab_size, turns=turns, seed=seed, **sizes)
    made = {"random": random_prompts, "passkey": passkey_prompts}[name]
    return made(vocab_size, seed=seed, **sizes)
