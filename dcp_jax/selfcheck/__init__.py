"""A short numerical check of this installation, on these devices.

`run` goes through the areas: index arithmetic and cache formats (`layout`), the ops alone
against `pallas_kernels.reference` (`ops`), then the exchanges and a whole model on meshes
of every size that the devices allow (`mesh`). Nothing is trusted to have been compiled
right before: every check builds its program anew.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from pallas_kernels.dispatch import IMPLEMENTATIONS

logger = logging.getLogger(__name__)

DCP_SIZES = (1, 2, 4, 8)
# Limits: integers and bytes; float32 sums in another order.
EXACT = 0.0
FLOAT32 = 2e-5

# cuDNN has one op, which is checked by name.
OWN_IMPLEMENTATIONS = tuple(name for name in IMPLEMENTATIONS if name != "cudnn")


@dataclass(frozen=True)
class Outcome:
    """One check.

    Attributes:
        area: what was checked.
        check: the case.
        limit: largest error that passes; 0 where results must be equal.
        error: what was measured; None if nothing could be.
        reason: why it was skipped, or the exception that ended it.
        skipped: it could not run here, which is neither good nor bad.
    """

    area: str
    check: str
    limit: float
    error: float | None = None
    reason: str = ""
    skipped: bool = False

    @property
    def status(self) -> Literal["ok", "FAILED", "SKIPPED"]:
        """NaN fails too."""
        if self.skipped:
            return "SKIPPED"
        return "ok" if self.error is not None and self.error <= self.limit else "FAILED"


Area = Callable[[], Iterable[Outcome]]


def run(areas: Iterable[Area]) -> Iterator[Outcome]:
    """The outcomes of all areas; an area that breaks off is a failure, not the end."""
    for area in areas:
        try:
            yield from area()
        except Exception as error:
            logger.debug("%s", area, exc_info=True)
            name = getattr(area, "__name__", str(area))
            yield Outcome(name, "all", 0.0, reason=f"{type(error).__name__}: {error}")


def measure(area: str, check: str, limit: float, compute: Callable[[], float]) -> Outcome:
    """The error that `compute` returns; what it raises is a failure, or a skip if it declines."""
    try:
        return Outcome(area, check, limit, error=float(compute()))
    except NotImplementedError as error:
        return Outcome(area, check, limit, reason=str(error), skipped=True)
    except Exception as error:
        logger.debug("%s: %s", area, check, exc_info=True)
        return Outcome(area, check, limit, reason=f"{type(error).__name__}: {error}")


def per_implementation(
    area: str,
    op: str,
    cases: dict[str, tuple[float, Callable[[str], float]]],
    implementations: Iterable[str] = OWN_IMPLEMENTATIONS,
) -> Iterator[Outcome]:
    """`cases` (limit, error for an implementation) of an op by every implementation there is."""
    for implementation in implementations:
        outcomes = [
            measure(
                area, f"{op} {name} [{implementation}]", limit, partial(compute, implementation)
            )
            for name, (limit, compute) in cases.items()
        ]
        if len({outcome.reason for outcome in outcomes}) == 1 and outcomes[0].skipped:
            first = outcomes[0]  # once is enough to say that it does not exist
            yield Outcome(area, f"{op} [{implementation}]", 0.0, reason=first.reason, skipped=True)
        else:
            yield from outcomes


def compiled(function: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """`function(*args, **static)` as one program, which no earlier call has compiled."""
    return jax.jit(partial(function, **static))(*args)


def distance(got, want) -> float:
    """Largest difference over all pairs of arrays, relative to the largest wanted value.

    Infinite where one has NaN or an infinity and the other has not, or a shape differs.
    """
    worst = 0.0
    for left, right in _pairs(got, want):
        left, right = left.astype(np.float64), right.astype(np.float64)
        if left.shape != right.shape:
            return np.inf
        finite = np.isfinite(right)
        if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
            return np.inf
        if finite.any():
            difference = np.abs(left[finite] - right[finite]).max()
            if not np.isfinite(difference):
                return np.inf
            worst = max(worst, difference / max(1.0, np.abs(right[finite]).max()))
    return float(worst)


def unequal(got, want) -> float:
    """How many entries differ; for integers, masks and bytes."""
    count = 0
    for left, right in _pairs(got, want):
        if left.shape != right.shape:
            return np.inf
        count += int((left != right).sum())
    return count


def _pairs(got: Any, want: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Two arrays, or the members of two tuples of arrays."""
    sides = (side if isinstance(side, tuple) else (side,) for side in (got, want))
    for left, right in zip(*sides, strict=True):
        yield np.asarray(left), np.asarray(right)


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """1 after a failure, else 3 if anything was skipped, else 0."""
    found = {outcome.status for outcome in outcomes}
    return 1 if "FAILED" in found else 3 if "SKIPPED" in found else 0
