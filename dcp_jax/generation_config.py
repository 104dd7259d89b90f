"""A checkpoint's `generation_config.json`: where to stop, and how it is meant to be sampled.

These are defaults, used where a request says nothing. Keys that are not listed here (beam search
and the other modes of `transformers`) do not change them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from dcp_jax.json_files import read_object

FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults of a checkpoint; None where it names none.

    Attributes:
        eos_token_ids: tokens that end a sequence, besides those of config.json.
        temperature: 0 is greedy; also when the file says `"do_sample": false`.
        top_p: share of the probability to sample from, above 0 and at most 1.
        top_k: most likely tokens to sample from; 0 is all of them.
        min_p: least probability, as a share of the most likely token's.
        repetition_penalty: divides the logits of tokens seen; 1 changes nothing.
        max_new_tokens: tokens to generate at most.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} is not {what}"
            for name, (valid, what) in _RULES.items()
            if getattr(self, name) is not None and not valid(getattr(self, name))
        ]
        if problems:
            raise ValueError(
                f"the generation config cannot be used: {'; '.join(problems)}. Correct the values "
                f"in {FILE} or remove them."
            )

    @classmethod
    def from_hf(cls, source: str | PathLike[str] | Mapping[str, Any]) -> "GenerationConfig":
        """Read a checkpoint directory's file, if it has one, or the dict that it holds."""
        raw = source if isinstance(source, Mapping) else read_object(Path(source) / FILE)
        names = {f.name for f in fields(cls)}
        values = {name: value for name, value in raw.items() if name in names}
        eos = raw.get("eos_token_id")
        if eos is not None:
            values["eos_token_ids"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        if raw.get("do_sample") is False:
            values["temperature"] = 0.0
        if values.get("top_k") == -1:
            values["top_k"] = 0
        return cls(**values)

    def sampling_defaults(self) -> dict[str, float | int]:
        """The defaults that the checkpoint names, by SamplingParams' names."""
        names = {f.name: f.name for f in fields(self) if f.name != "eos_token_ids"}
        names["max_new_tokens"] = "max_tokens"
        values = {name: getattr(self, field) for field, name in names.items()}
        return {name: value for name, value in values.items() if value is not None}

    def united_eos(self, config_eos: Iterable[int]) -> tuple[int, ...]:
        """The end-of-sequence tokens of config.json and of this file: either ends a sequence."""
        return tuple(dict.fromkeys((*config_eos, *self.eos_token_ids)))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return (_whole(value) or isinstance(value, float)) and math.isfinite(value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "eos_token_ids": (lambda ids: all(_whole(i) and i >= 0 for i in ids), "token ids"),
    "temperature": (lambda v: _number(v) and v >= 0, "a number of at least 0"),
    "top_p": (lambda v: _number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda v: _whole(v) and v >= 0, "a count, or 0 or -1 for all tokens"),
    "min_p": (lambda v: _number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: _number(v) and v > 0, "a number above 0"),
    "max_new_tokens": (lambda v: _whole(v) and v >= 1, "a count of at least 1"),
}
