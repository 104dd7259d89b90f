"""What one step is to run. Plain Python: no jax."""

from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_jax.engine.request import Request


class DecodeRow(NamedTuple):
    """A running request draws up to `steps` tokens.

    Attributes:
        request: whose.
        start: tokens in the cache before.
        steps: tokens to draw.
        in_flight: its newest token was drawn by a launch that has not been read.
    """

    request: Request
    start: int
    steps: int
    in_flight: bool


class PrefillChunk(NamedTuple):
    """Tokens start..start+length-1 of a request are read; the `last` ones draw the next token."""

    request: Request
    start: int
    length: int
    last: bool


@dataclass
class StepPlan:
    """One step.

    Attributes:
        decode: rows of the decode launch.
        chunks: of prompts.
        admitted: requests that got a slot for it.
    """

    decode: list[DecodeRow] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
