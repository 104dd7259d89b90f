"""`SamplingParams`: how prompts are continued. Names, defaults and meanings are vLLM's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Attributes:
        n: continuations per prompt.
        temperature: 0 takes the most likely token (greedy).
        top_p: keep the most likely tokens that together have this probability.
        top_k: keep this many tokens; 0 or -1 keeps all.
        min_p: keep tokens with at least this share of the most likely one's probability.
        seed: of the noise; the same seed gives the same text whatever else runs. None draws one.
        presence_penalty: subtracted once from tokens generated before.
        frequency_penalty: subtracted once per time generated before.
        repetition_penalty: divides (positive) or multiplies the logits of tokens seen before, those
            of the prompt included.
        logit_bias: added to the logits of these tokens.
        max_tokens: tokens to generate at most; None fills the context.
        min_tokens: no end before this many.
        stop: texts that end the continuation.
        stop_token_ids: tokens that end it.
        include_stop_str_in_output: keep the text that ended it.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: report each token's log-probability and those of this many most likely ones.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: every value that cannot be used, in one message.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self):
        # vLLM's None for "none", and one stop string without a list.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", self.stop_token_ids or ())
        problems = list(self._problems())
        if problems:
            raise ValueError(
                "these sampling parameters cannot be used: " + "; ".join(problems) + "."
            )

    @property
    def penalised(self) -> bool:
        """Whether tokens seen before change the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0.0, 0.0, 1.0)

    def check_for(self, vocab_size: int, *, has_tokenizer: bool) -> None:
        """Refuse what this model cannot do.

        Raises:
            ValueError: token ids outside the vocabulary, or stop strings without a tokenizer.
        """
        wrong = [t for t in (*self.stop_token_ids, *(self.logit_bias or {})) if t >= vocab_size]
        if wrong:
            raise ValueError(
                f"stop_token_ids or logit_bias name tokens outside the vocabulary: {wrong[:5]!r}; "
                f"ids go from 0 to {vocab_size - 1}."
            )
        if self.stop and not has_tokenizer:
            raise ValueError(
                f"stop={list(self.stop)!r} needs text, and the checkpoint has no tokenizer: give "
                "stop_token_ids."
            )

    def _problems(self):
        def real(name, low, high, why, open_low=False):
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high or (open_low and value == low):
                yield f"{name}={value!r}, {why}"

        def whole(name, low, high, why, optional=False):
            value = getattr(self, name)
            if value is None and optional:
                return
            if not _is_whole(value) or value < low or (high is not None and value > high):
                yield f"{name}={value!r}, {why}"

        yield from whole("n", 1, None, "which is no number of continuations: give at least 1")
        yield from real("temperature", 0, math.inf, "which is no temperature: give 0 or more")
        yield from real("top_p", 0, 1, "which is no share: give above 0 and at most 1", True)
        yield from whole("top_k", -1, None, "which is no count: give 1 or more, or 0 for all")
        yield from real("min_p", 0, 1, "which is no share: give 0 to 1")
        yield from whole("seed", 0, 2**64 - 1, "which is no seed: give 0 to 2**64 - 1", True)
        for name in ("presence_penalty", "frequency_penalty"):
            yield from real(name, -2, 2, "outside OpenAI's range: give -2 to 2")
        yield from real("repetition_penalty", 0, math.inf, "which divides: give above 0", True)
        yield from whole("max_tokens", 1, None, "which generates nothing: give at least 1", True)
        yield from whole("min_tokens", 0, None, "which is no count: give 0 or more")
        least, most = self.min_tokens, self.max_tokens
        if isinstance(least, int) and isinstance(most, int) and least > most:
            yield f"min_tokens={least}, above max_tokens={most}: lower it"
        for name in ("logprobs", "prompt_logprobs"):
            why = f"which is not reported: give 0 to {MAX_LOGPROBS}"
            yield from whole(name, 0, MAX_LOGPROBS, why, True)
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Sequence):
                yield f"{name}={getattr(self, name)!r}: give a list"
                return
        if not isinstance(self.logit_bias, Mapping | None):
            yield f"logit_bias={self.logit_bias!r}: give a dict from token ids to values"
            return
        for text in self.stop:
            if not isinstance(text, str) or not text:
                yield f"stop={list(self.stop)!r}, where {text!r} ends nothing: give non-empty texts"
        if not all(_is_whole(token) and token >= 0 for token in self.stop_token_ids):
            yield f"stop_token_ids={list(self.stop_token_ids)!r}: give token ids"
        for token, bias in (self.logit_bias or {}).items():
            if not _is_whole(token) or token < 0 or not _is_number(bias) or not -100 <= bias <= 100:
                yield f"logit_bias has {token!r}: {bias!r}: give token ids and -100 to 100"


def _is_whole(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating)
    return number and not isinstance(value, bool) and math.isfinite(value)
