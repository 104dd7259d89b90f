"""Sampling options of the command line, shared by `generate` and `chat`."""

import dataclasses
from typing import Annotated, Any

import tyro
from tyro.conf import arg


@dataclasses.dataclass(frozen=True)
class SamplingArgs:
    """Sampling; what is not given is what the checkpoint's generation_config.json recommends."""

    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    """Keep the most likely tokens that together have this probability."""
    top_k: int | None = None
    """Keep this many tokens; 0 keeps all."""
    min_p: float | None = None
    """Keep tokens with this share of the most likely one's probability."""
    seed: int | None = None
    """The same seed gives the same text."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens generated before."""
    frequency_penalty: float | None = None
    """The same, per time generated."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens seen before."""
    max_tokens: Annotated[int | None, arg(aliases=["--max-new-tokens"])] = None
    """Tokens to generate at most."""
    min_tokens: int | None = None
    """No end before this many."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the continuation; may be repeated."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""

    def check(self) -> None:
        """Refuse what cannot be used, before anything loads."""
        from dcp_jax.engine.sampling_params import SamplingParams

        # Without a limit: what the checkpoint recommends is not known yet.
        values: dict[str, Any] = {"max_tokens": None, **self.given()}
        SamplingParams(**values)

    def given(self) -> dict[str, Any]:
        """The options that were given, by SamplingParams' names."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {n: v for n, v in values.items() if v is not None and v is not False and v != ()}
