"""The stages of training, and what the learning rate is at each step.

One program per stage: shapes and switches are constant within it. Short sequences first, because
lookup appears suddenly and soonest there; every length that is promised is trained, because nothing
extrapolates; the main attention becomes sparse only when the indexer already finds the needles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

# Shares of the tasks in `documents`.
_LOOKUP = {"text": 0.15, "anchors": 0.2, "copy": 0.15, "keys": 0.35, "passkey": 0.15}
_SHORT = {
    **{"text": 0.35, "anchors": 0.05, "copy": 0.1, "keys": 0.15},
    **{"passkey": 0.15, "named": 0.2},
}
_LONG = {"text": 0.25, "copy": 0.05, "passkey": 0.3, "named": 0.4}


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: for the log and the command line.
        steps: how many.
        length: tokens of a sequence.
        batch: sequences of a step.
        shares: task -> probability.
        lr: learning rate at the first and the last step, linear between.
        warm_up: steps in which the rate rises from 0.
        shortest: documents have lengths from here to `length`.
        sparse: main attention over the top `index_topk` keys, as deployed; else over all.
        fp8: latents and index rows rounded as the fp8 caches round them.
        drafts: passes of the MTP layer; the second is fed with the first's own output.
        margin: weight of the indexer's margin term.
        balance: rate of the router's correction bias.
    """

    name: str
    steps: int
    length: int
    batch: int
    shares: Mapping[str, float]
    lr: tuple[float, float]
    warm_up: int = 20
    shortest: int = 320
    sparse: bool = False
    fp8: bool = False
    drafts: int = 1
    margin: float = 0.0
    balance: float = 1e-3

    @property
    def rows(self) -> int:
        """Query rows per sequence at which the indexer is trained: about 2,048 a step."""
        return min(max(2048 // self.batch, 16), 256, self.length)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.length * self.batch

    def learning_rate(self, step: int) -> float:
        """At step `step` of this stage, from 0 on."""
        first, last = self.lr
        rate = first + (last - first) * step / max(self.steps - 1, 1)
        return rate * min(1.0, (step + 1) / (self.warm_up + 1))


# Times are of one H200, per step, from a trial of the same shapes.
STAGES = (
    Stage("lookup", 1500, 512, 128, _LOOKUP, (3e-3, 3e-3), warm_up=200),  # 28 ms
    Stage("warm-up", 1500, 2048, 32, _SHORT, (3e-3, 2e-3), drafts=2),  # 50 ms
    Stage("dense", 1500, 8192, 8, _SHORT, (1.5e-3, 1e-3), shortest=512),  # 78 ms
    Stage("dense-32k", 240, 32768, 2, _LONG, (8e-4, 8e-4), shortest=1024),
    Stage("sparse", 500, 8192, 8, _SHORT, (7e-4, 5e-4), shortest=512, sparse=True, margin=0.3),
    Stage(
        *("long", 1300, 32768, 1, _LONG, (5e-4, 5e-5)),
        **{"shortest": 1024, "sparse": True, "margin": 0.3, "balance": 1e-4},
    ),
    Stage(
        *("fp8", 100, 32768, 1, _LONG, (5e-5, 5e-6)),
        **{"shortest": 1024, "sparse": True, "fp8": True, "drafts": 2},
        **{"margin": 0.3, "balance": 0.0},
    ),
)


def with_steps(stages: tuple[Stage, ...], changes: Mapping[str, int]) -> tuple[Stage, ...]:
    """The stages with other step counts.

    Raises:
        ValueError: a stage that does not exist, or a negative count.
    """
    names = [stage.name for stage in stages]
    for name, steps in changes.items():
        if name not in names or steps < 0:
            raise ValueError(
                f"--steps {name}={steps} fits no stage: name one of {names} with a count from 0 on."
            )
    return tuple(replace(s, steps=changes.get(s.name, s.steps)) for s in stages)
