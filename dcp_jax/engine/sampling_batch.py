"""From running sequences to the sampler's arrays: only what some row asks for is built."""

from collections.abc import Sequence as Many

import numpy as np

from dcp_jax.engine.buckets import bucket
from dcp_jax.engine.sampler import SamplerOptions, Sampling, SamplingBatch
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.sequence import Sequence

# Histories and edited tokens are padded to few sizes: each is a program.
_HISTORY, _EDITS = 256, 8
_ALL = 2**31 - 1  # no vocabulary is larger
_COLDEST = 1e-5


def sampling_of(sequences: Many[Sequence]) -> Sampling | None:
    """How to draw the next token of each sequence; None if all just take the most likely one."""
    params = [s.params for s in sequences]
    edits = [s.edits() for s in sequences]
    opts = SamplerOptions(
        filters=any(_heat(p) > 0 for p in params),
        penalties=any(p.penalised for p in params),
        edits=any(edits),
        top_logprobs=max(-1 if p.logprobs is None else p.logprobs for p in params),
    )
    if opts == SamplerOptions():
        return None
    # Few programs: the number of alternatives is rounded up, and cut again on the host.
    if opts.top_logprobs > 0:
        opts = SamplerOptions(
            opts.filters, opts.penalties, opts.edits, 5 if opts.top_logprobs <= 5 else 20
        )
    rows = len(sequences)
    histories = [s.token_ids if p.penalised else [] for s, p in zip(sequences, params, strict=True)]
    history = _ragged(histories, _HISTORY, np.int32, -1)
    generated = np.zeros(history.shape, bool)
    for row, sequence in enumerate(sequences):
        generated[row, len(sequence.prompt_token_ids) : len(histories[row])] = True
    return Sampling(
        SamplingBatch(
            temperature=np.array([_heat(p) for p in params], np.float32),
            top_k=np.array([min(max(p.top_k, 0), _ALL) for p in params], np.int32),
            top_p=_column(params, "top_p", np.float32),
            min_p=_column(params, "min_p", np.float32),
            seed=np.array([s.seed for s in sequences], np.uint32),
            position=np.array([len(s.token_ids) for s in sequences], np.int32),
            repetition=_column(params, "repetition_penalty", np.float32),
            presence=_column(params, "presence_penalty", np.float32),
            frequency=_column(params, "frequency_penalty", np.float32),
            history=history,
            generated=generated,
            edit_ids=_ragged([list(e) for e in edits], _EDITS, np.int32, -1, rows),
            edit_values=_ragged([list(e.values()) for e in edits], _EDITS, np.float32, 0, rows),
        ),
        opts,
    )


def _heat(params: SamplingParams) -> float:
    """The temperature; one that no logit could be divided by is greedy, as in vLLM."""
    return params.temperature if params.temperature >= _COLDEST else 0.0


def _column(params, name: str, dtype) -> np.ndarray:
    return np.array([getattr(p, name) for p in params], dtype)


def _ragged(lists: list[list], smallest: int, dtype, fill, rows: int | None = None) -> np.ndarray:
    """Lists as rows of one array; no column at all if every list is empty."""
    longest = max(map(len, lists))
    array = np.full(
        (rows or len(lists), bucket(longest, 4, smallest) if longest else 0), fill, dtype
    )
    for row, values in enumerate(lists):
        array[row, : len(values)] = values
    return array
