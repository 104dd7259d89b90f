"""Teacher-forced passes over one prompt: its logits, its log-probabilities, its selections."""

from collections.abc import Iterator

import numpy as np
from tqdm.auto import tqdm

from dcp_jax.engine.engine import Engine
from dcp_jax.engine.logprobs import log_softmax
from dcp_jax.engine.reading import Chunk, read_prompt
from dcp_jax.reports import ExplainReport, PromptLogprobs, explain_report, row_of


def score(
    engine: Engine,
    ids: list[int],
    positions: list[int] | None,
    output: str,
    top_logprobs: int,
    max_bytes: int,
    use_tqdm: bool,
) -> np.ndarray | PromptLogprobs:
    """See `LLM.score`."""
    if output not in ("logits", "logprobs"):
        raise ValueError(f'output={output!r} is unknown: use "logits" or "logprobs".')
    vocab = engine.runner.model.cfg.vocab_size
    last = len(ids) if output == "logits" else len(ids) - 1
    wanted = np.arange(last) if positions is None else np.asarray(positions)
    if wanted.size == 0:
        wanted = np.zeros(0, np.int64)
    if wanted.ndim != 1 or not np.issubdtype(wanted.dtype, np.integer):
        raise ValueError(f"positions={positions!r} is not a list of whole numbers: give one.")
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < last):
        raise ValueError(
            f"positions must lie in 0..{last - 1} for {output} of a prompt of {len(ids)} tokens: "
            f"got {wanted.min()} to {wanted.max()}."
        )
    if not 0 <= top_logprobs <= vocab or (top_logprobs and output == "logits"):
        raise ValueError(
            f"top_logprobs={top_logprobs} with output={output!r}: it goes with "
            f'output="logprobs" and is at most the vocabulary, {vocab}.'
        )
    result = wanted.size * (vocab * 4 if output == "logits" else 8 + 8 * top_logprobs)
    if result > max_bytes:
        less = 'use output="logprobs"' if output == "logits" else "lower top_logprobs"
        raise ValueError(
            f"the {output} of {wanted.size} positions take {result:,} bytes, more than max_bytes="
            f"{max_bytes:,}: name fewer positions, {less}, or raise max_bytes."
        )
    # A step's logits are padded to its bucket, which may be four times the tokens in it.
    chunk_tokens = max(1, max_bytes // (vocab * 16))
    parts, ascending = [], np.sort(wanted)
    for chunk in _read(engine, ids, use_tqdm, chunk=chunk_tokens, logits="all"):
        end = chunk.start + chunk.length
        here = ascending[(ascending >= chunk.start) & (ascending < end)]
        logits = chunk.result.logits[0, here - chunk.start]
        parts.append(_scored(logits, here, ids, output, top_logprobs))
    asked = np.argsort(np.argsort(wanted, kind="stable"), kind="stable")
    joined = [np.concatenate(arrays)[asked] for arrays in zip(*parts, strict=True)]
    return joined[0] if output == "logits" else PromptLogprobs(*joined)


def explain(
    engine: Engine, ids: list[int], layers: tuple[int, ...], use_tqdm: bool
) -> ExplainReport:
    """See `LLM.explain`."""
    chunks = [
        (
            chunk.path,
            row_of(chunk.result.explanation, 0, chunk.length),
            chunk.result.received_bytes,
            chunk.result.reruns,
        )
        for chunk in _read(engine, ids, use_tqdm, explain=True)
    ]
    return explain_report(chunks, engine.runner.model.cfg.index_topk, layers)


def _read(
    engine: Engine, ids: list[int], use_tqdm: bool, chunk: int | None = None, **changes
) -> Iterator[Chunk]:
    """Prefill `ids` on pages of its own, given back afterwards; a bar if it takes several steps.

    Raises:
        ValueError: running requests hold the pages.
    """
    largest = engine.scheduler.options.chunked_prefill_size
    size = min(largest, chunk or largest)
    pages = engine.scheduler.reserve(len(ids))
    if pages is None:
        raise ValueError(
            f"a prompt of {len(ids)} tokens finds no free pages: finish or close the streams that "
            "hold the others."
        )
    quiet = not use_tqdm or len(ids) <= size
    try:
        with tqdm(total=len(ids), desc="prefill", unit="tok", disable=quiet) as bar:
            for part in read_prompt(
                engine.runner, engine.policy, ids, pages, chunk=size, **changes
            ):
                bar.update(part.length)
                yield part
    finally:
        engine.scheduler.release(pages)


def _scored(logits, positions, ids, output, top) -> tuple[np.ndarray, ...]:
    if output == "logits":
        return (logits,)
    logprobs = log_softmax(logits)
    own = logprobs[np.arange(len(positions)), np.asarray(ids)[positions + 1]]
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :top]
    return own, positions, best.astype(np.int32), np.take_along_axis(logprobs, best, axis=-1)
