"""Limits of the scheduler. Plain Python: no jax."""

from dataclasses import dataclass
from numbers import Integral


@dataclass(frozen=True)
class SchedulerOptions:
    """Limits.

    Attributes:
        max_running_requests: requests that have a slot.
        chunked_prefill_size: tokens of prompts per step, rows of decode included; however many
            these are, half of it is left to prompts.
        decode_steps: tokens that a decode row draws, at most.
        max_queued_requests: more than these may not wait; None for no limit.

    Raises:
        ValueError: a value that is no count.
    """

    max_running_requests: int = 64
    chunked_prefill_size: int = 8192
    decode_steps: int = 1
    max_queued_requests: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is None and name == "max_queued_requests":
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{name}={value!r} is not a count: give a whole number of at least 1."
                )
