"""What a traced step exchanges: every collective of its jaxpr, with kind and bytes.

Read from the program itself, not from a formula: `explain` and the tests report these numbers.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend.core import jaxprs_in_params

# Fraction of (axis size - 1) x operand bytes that one rank receives.
_SHARE = {
    "all_gather": lambda size: size - 1,
    "all_to_all": lambda size: (size - 1) / size,
    "reduce_scatter": lambda size: (size - 1) / size,
    "psum": lambda size: 2 * (size - 1) / size,
}
_KIND = re.compile(r"exchange\.(\w+)")


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
        kind: "q", "candidates", "merge", "latent", "index_k", "tp_sum" or "argmax".
        op: name of the primitive.
        axes: mesh axes that it spans.
        ranks: their total size.
        operand_bytes: bytes of one rank's operand.
        times: how often it runs in a step.
    """

    kind: str
    op: str
    axes: tuple[str, ...]
    ranks: int
    operand_bytes: int
    times: int

    @property
    def received_bytes(self) -> int:
        """Bytes that one rank receives in a step (ring counts for sums)."""
        return round(_SHARE[self.op](self.ranks) * self.operand_bytes * self.times)


def collectives(jaxpr: Any, axis_sizes: dict[str, int], times: int = 1) -> Iterator[Collective]:
    """Every collective of a (closed) jaxpr, those inside calls, loops and shard_map included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        op = eqn.primitive.name.removesuffix("_invariant")
        if op in _SHARE:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            scope = _KIND.search(str(eqn.source_info.name_stack))
            operands = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in eqn.invars)
            yield Collective(
                kind=scope.group(1) if scope else "other",
                op=op,
                axes=axes,
                ranks=math.prod(axis_sizes[axis] for axis in axes),
                operand_bytes=operands,
                times=times,
            )
        inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in jaxprs_in_params(eqn.params):
            yield from collectives(inner, axis_sizes, inner_times)


def received_by_kind(found: list[Collective]) -> dict[str, int]:
    """Bytes that one rank receives in a step, by kind of exchange."""
    totals: Counter[str] = Counter()
    for collective in found:
        totals[collective.kind] += collective.received_bytes
    return dict(totals)
