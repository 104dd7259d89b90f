"""A request while it runs: its tokens, its text, where it stands, and what ended it."""

from dataclasses import dataclass, field

from dcp_jax.cache.pages import Holding
from dcp_jax.engine.outputs import Logprob
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.text import TextStream


@dataclass(eq=False)
class Request:
    """One continuation of a prompt; compared and hashed by identity.

    Attributes:
        prompt_token_ids: the prompt.
        params: what was asked for.
        limit: tokens to generate at most, the end of the context included.
        seed: uint32, of the noise.
        eos_token_ids: tokens that end a text.
        text: detokenizer and stop strings; None without a tokenizer.
        cache_salt: prefixes are shared with requests of the same salt only.
        output_token_ids: generated so far; the last one is not in the cache yet.
        logprobs: of the generated tokens and their most likely alternatives, if asked for.
        prompt_logprobs: the same of the prompt; None for its first token.
        finish_reason: "stop", "length", "abort" or "error" once it ended.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence
            token.
        error: what ended it, if a step failed.
        cached_tokens: of the prompt, found in the prefix cache when it first ran.
        added: the scheduler has it, or had it. The scheduler's, as what follows is.
        slot: while it runs: its place on the devices; else -1.
        holding: its pages.
        launched: tokens whose cache rows are written by launches so far; computed: by those that
            were read.
        pending: tokens drawn by launches that were not read yet.
        runs: how often it was started; more than once after preemption.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    text: TextStream | None = None
    cache_salt: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    added: bool = False
    slot: int = -1
    holding: Holding = field(default_factory=Holding)
    launched: int = 0
    computed: int = 0
    pending: int = 0
    runs: int = 0

    @property
    def finished(self) -> bool:
        """Whether it ended, in whatever way."""
        return self.finish_reason is not None

    @property
    def pages(self) -> list[int]:
        """Pages that it holds, in order; only appended to while it runs."""
        return self.holding.pages

    @property
    def length(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def most_tokens(self) -> int:
        """Tokens in the cache at most: the last one that is generated is not read again."""
        return len(self.prompt_token_ids) + self.limit - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop-1 of prompt and generated ones, without a copy of the others."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        generated = self.output_token_ids[max(start - prompt, 0) : stop - prompt]
        return self.prompt_token_ids[start:] + generated

    def append(self, token: int) -> None:
        """Add a generated token and see whether it ends the request."""
        self.output_token_ids.append(token)
        if token in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        shown = self.finish_reason is None or self.params.include_stop_str_in_output
        if self.text is not None and shown:
            self.text.add(token, may_stop=len(self.output_token_ids) >= self.params.min_tokens)
        if self.finish_reason is None and len(self.output_token_ids) >= self.limit:
            self.finish_reason = "length"
        self._end_text()

    def _end_text(self) -> None:
        """A stop string ends the request, even one that only the last bytes complete."""
        if self.text is None:
            return
        if self.finish_reason is not None:
            self.text.finish()
        if self.text.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.text.matched
