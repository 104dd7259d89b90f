"""From requests to what the caller gets: finished ones, and pieces of a running one."""

from collections.abc import Iterator
from dataclasses import replace

from dcp_jax.engine.outputs import CompletionOutput, Logprobs, RequestOutput, StreamOutput
from dcp_jax.engine.request import Request
from dcp_jax.tokenizer import Tokenizer


def request_output(
    request_id: str, prompt: str | None, group: list[Request], tokenizer: Tokenizer | None
) -> RequestOutput:
    """The result of one prompt's finished requests.

    Raises:
        StepError: one of them failed.
    """
    for request in group:
        if request.error is not None:
            raise request.error
    first = group[0]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=[_completion(i, request, tokenizer) for i, request in enumerate(group)],
        prompt_logprobs=[entry and _named(entry, tokenizer) for entry in first.prompt_logprobs]
        or None,
        num_cached_tokens=first.cached_tokens,
    )


class Pieces:
    """What has been streamed of the requests of one prompt; each call gives what is new."""

    def __init__(self, group: list[Request], tokenizer: Tokenizer | None):
        self._group = group
        self._tokenizer = tokenizer
        self._shown = [(0, 0, False) for _ in group]

    def new(self) -> Iterator[StreamOutput]:
        """The tokens and the text that came since the last call.

        Raises:
            StepError: a request failed.
        """
        for i, request in enumerate(self._group):
            if request.error is not None:
                raise request.error
            text = request.text.text if request.text else ""
            tokens, characters, ended = self._shown[i]
            if ended or (len(request.output_token_ids) == tokens and not request.finished):
                continue
            self._shown[i] = len(request.output_token_ids), len(text), request.finished
            entries = request.logprobs[tokens:]
            yield StreamOutput(
                text=text[characters:],
                token_ids=request.output_token_ids[tokens:],
                index=i,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                logprobs=[_named(entry, self._tokenizer) for entry in entries] or None,
            )


def _completion(index: int, request: Request, tokenizer: Tokenizer | None) -> CompletionOutput:
    asked = request.params.logprobs is not None
    pairs = zip(request.logprobs, request.output_token_ids, strict=True) if asked else ()
    return CompletionOutput(
        index=index,
        text=request.text.text if request.text else "",
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason or "length",
        stop_reason=request.stop_reason,
        logprobs=[_named(entry, tokenizer) for entry in request.logprobs] if asked else None,
        cumulative_logprob=sum(entry[t].logprob for entry, t in pairs) if asked else None,
    )


def _named(entry: Logprobs, tokenizer: Tokenizer | None) -> Logprobs:
    """With the text of each token, where there is a tokenizer."""
    if tokenizer is None:
        return entry
    return {
        token: replace(value, decoded_token=tokenizer.decode([token], skip_special_tokens=False))
        for token, value in entry.items()
    }
