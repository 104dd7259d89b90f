"""Requests: what a caller asks for, a sequence while it runs, and what the caller gets back."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Attributes:
        temperature: 0 takes the most likely token (greedy), the only value so far.
        max_tokens: tokens to generate at most; the model's context ends a request too.
        ignore_eos: go on after an end-of-sequence token.
    """

    temperature: float = 0.0
    max_tokens: int = 16
    ignore_eos: bool = False

    def __post_init__(self):
        if self.temperature != 0.0:
            raise ValueError(
                f"temperature={self.temperature} asks for sampling, which is not implemented: only "
                "greedy decoding is; use temperature=0.0."
            )
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
            raise ValueError(f"max_tokens={self.max_tokens!r} is not a whole number: give one.")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} generates nothing: give at least 1.")


@dataclass
class Sequence:
    """One request while it runs.

    Attributes:
        prompt_token_ids: the prompt.
        params: what was asked for.
        limit: tokens to generate at most, the context's end included.
        pages: pages that it holds, in order.
        output_token_ids: generated so far; the last one is not in the cache yet.
        finish_reason: "stop" or "length" once it ended.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int
    pages: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache while decoding: all but the newest."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    def append(self, token: int, eos_token_ids: tuple[int, ...]) -> None:
        """Add a generated token and see whether it ends the sequence."""
        self.output_token_ids.append(token)
        if token in eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif len(self.output_token_ids) >= self.limit:
            self.finish_reason = "length"


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation; the fields are vLLM's.

    Attributes:
        index: number among the request's continuations.
        text: decoded text, "" without a tokenizer; the end-of-sequence token is left out.
        token_ids: generated ids, the end-of-sequence token included.
        finish_reason: "stop" (end-of-sequence token) or "length".
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class RequestOutput:
    """A finished request; the fields are vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
