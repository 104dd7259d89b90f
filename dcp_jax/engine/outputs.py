"""What a caller gets back; names and meanings of the fields are vLLM's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability by the model's own logits, its rank from 1 (the best), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation.

    Attributes:
        index: number among the prompt's continuations.
        text: decoded text up to what ended it; "" without a tokenizer.
        token_ids: generated ids, one that ended the text included.
        finish_reason: "stop" (end-of-sequence token, stop token or stop string), "length" or
            "abort".
        stop_reason: the stop string or stop token id that ended it, else None.
        logprobs: per token, if asked for.
        cumulative_logprob: their sum.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A finished request: its prompt and its `n` continuations.

    `num_cached_tokens` of the prompt were in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class StreamOutput:
    """What a step added to a streamed continuation.

    Attributes:
        text: new text; pieces joined are the whole text.
        token_ids: new ids.
        index: number among the prompt's continuations.
        finish_reason: set on the last piece of a continuation.
        stop_reason: see `CompletionOutput`.
        logprobs: of the new ids, if asked for.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprobs] | None = None
