"""From sequences to what the caller gets: finished requests, and pieces of a running one."""

from collections.abc import Iterator
from dataclasses import replace

from dcp_jax.engine.engine import Engine
from dcp_jax.engine.outputs import CompletionOutput, Logprobs, RequestOutput, StreamOutput
from dcp_jax.engine.sequence import Sequence
from dcp_jax.tokenizer import Tokenizer


def request_output(
    request_id: str, prompt: str | None, group: list[Sequence], tokenizer: Tokenizer | None
) -> RequestOutput:
    """The result of one prompt's finished sequences."""
    first = group[0]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_token_ids,
        outputs=[_completion(i, sequence, tokenizer) for i, sequence in enumerate(group)],
        prompt_logprobs=[entry and _named(entry, tokenizer) for entry in first.prompt_logprobs]
        or None,
    )


def stream_pieces(
    engine: Engine, group: list[Sequence], tokenizer: Tokenizer | None
) -> Iterator[StreamOutput]:
    """What every step adds to each sequence of one prompt."""
    shown = [(0, 0) for _ in group]
    for _ in engine.run(group):
        for i, sequence in enumerate(group):
            text = sequence.text.text if sequence.text else ""
            tokens, characters = shown[i]
            if tokens == len(sequence.output_token_ids):
                continue
            shown[i] = len(sequence.output_token_ids), len(text)
            yield StreamOutput(
                text=text[characters:],
                token_ids=sequence.output_token_ids[tokens:],
                index=i,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                logprobs=[_named(entry, tokenizer) for entry in sequence.logprobs[tokens:]] or None,
            )


def _completion(index: int, sequence: Sequence, tokenizer: Tokenizer | None) -> CompletionOutput:
    asked = sequence.params.logprobs is not None
    pairs = zip(sequence.logprobs, sequence.output_token_ids, strict=True) if asked else ()
    return CompletionOutput(
        index=index,
        text=sequence.text.text if sequence.text else "",
        token_ids=sequence.output_token_ids,
        finish_reason=sequence.finish_reason or "length",
        stop_reason=sequence.stop_reason,
        logprobs=[_named(entry, tokenizer) for entry in sequence.logprobs] if asked else None,
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
