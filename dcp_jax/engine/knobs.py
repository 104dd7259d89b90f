"""From sampling parameters to what a slot holds of them, and to the least sampler they need."""

import math

import numpy as np

from dcp_jax.engine.ladder import Sampler
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.slots import EDITS, FLOATS, Knobs, default_knobs

_ALL = 2**31 - 1  # no vocabulary is larger, no position later
_COLDEST = 1e-5


def sampler_of(params: SamplingParams) -> Sampler:
    """The least sampler that can draw as asked."""
    edited = params.logit_bias or params.min_tokens
    if params.penalised or edited or params.logprobs is not None:
        return "full"
    return "drawn" if _heat(params) > 0 else "greedy"


def knobs_of(
    params: SamplingParams, *, seed: int, prompt_tokens: int, eos_token_ids: tuple[int, ...] = ()
) -> Knobs:
    """The row of one request.

    Args:
        params: what was asked for.
        seed: uint32, of its noise.
        prompt_tokens: length of the prompt: ends are banned until `min_tokens` more.
        eos_token_ids: tokens that end a text.

    Raises:
        ValueError: more edited tokens than a slot holds.
    """
    bias = dict(params.logit_bias or {})
    ends = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else set()
    edits = [(token, value, _ALL) for token, value in bias.items()]
    edits += [(token, -math.inf, prompt_tokens + params.min_tokens) for token in sorted(ends)]
    if len(edits) > EDITS:
        raise ValueError(
            f"logit_bias names {len(bias)} tokens and min_tokens bans {len(ends)} ends: at most "
            f"{EDITS} together."
        )
    knobs = default_knobs()
    values = {
        "temperature": _heat(params),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
    }
    knobs.floats[:] = [values[name] for name in FLOATS]
    knobs.ints[0] = min(max(params.top_k, 0), _ALL)
    knobs.ints[1] = np.uint32(seed).view(np.int32)
    for i, (token, value, until) in enumerate(edits):
        knobs.edit_ids[i], knobs.edit_values[i], knobs.edit_until[i] = token, value, until
    return knobs


def _heat(params: SamplingParams) -> float:
    """The temperature; one that no logit could be divided by is greedy, as in vLLM."""
    return params.temperature if params.temperature >= _COLDEST else 0.0
