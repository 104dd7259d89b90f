"""A sequence while it runs: its tokens, its text, and what ended it."""

import math
from dataclasses import dataclass, field

from dcp_jax.engine.outputs import Logprob
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.text import TextStream
from dcp_jax.policy import PrefillPolicy


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt.

    Attributes:
        prompt_token_ids: the prompt.
        params: what was asked for.
        limit: tokens to generate at most, the end of the context included.
        seed: uint32, of the noise.
        eos_token_ids: tokens that end a text.
        text: detokenizer and stop strings; None without a tokenizer.
        prefill_policy: chooses the paths of the prompt; None takes the engine's.
        pages: pages that it holds, in order.
        output_token_ids: generated so far; the last one is not in the cache yet.
        logprobs: of the generated tokens and their most likely alternatives, if asked for.
        prompt_logprobs: the same of the prompt; None for its first token.
        finish_reason: "stop" or "length" once it ended.
        stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence
            token.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    text: TextStream | None = None
    prefill_policy: PrefillPolicy | None = None
    pages: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache while decoding: all but the newest."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    def edits(self) -> dict[int, float]:
        """Tokens whose logit changes for the next draw, and by how much; -inf bans one."""
        edits = dict(self.params.logit_bias or {})
        if len(self.output_token_ids) < self.params.min_tokens:
            edits |= dict.fromkeys((*self.eos_token_ids, *self.params.stop_token_ids), -math.inf)
        return edits

    def append(self, token: int) -> None:
        """Add a generated token and see whether it ends the sequence."""
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
        """A stop string ends the sequence, even one that only the last bytes complete."""
        if self.text is None:
            return
        if self.finish_reason is not None:
            self.text.finish()
        if self.text.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.text.matched
