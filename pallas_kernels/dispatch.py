"""Choice of an op's implementation.

An implementation is a plain function; it raises `NotImplementedError` to say "not for these inputs
on this device".
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# In the order of preference: what None tries first.
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "cudnn", "xla")


def pick(
    op_name: str, implementation: str | None, table: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The function to call for `implementation`.

    None gives a function that tries the members of `table` in the order of `IMPLEMENTATIONS` and
    returns the first answer that is not a `NotImplementedError`.

    Raises:
        ValueError: `implementation` is no known name.
        NotImplementedError: it is a known name, but the op has no such implementation.
    """
    if implementation is None:
        present = [name for name in IMPLEMENTATIONS if name in table]
        if len(present) == 1:
            return table[present[0]]
        return lambda *args, **kwargs: _first_supported(op_name, table, present, args, kwargs)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op_name}: implementation={implementation!r} is not a known name; "
            f"use None or one of {', '.join(IMPLEMENTATIONS)}."
        )
    if implementation not in table:
        raise NotImplementedError(
            f"{op_name}: implementation={implementation!r} does not exist for this op; "
            f"use None or one of {', '.join(table)}."
        )
    return table[implementation]


def _first_supported(op_name, table, names, args, kwargs):
    reasons = []
    for name in names:
        try:
            return table[name](*args, **kwargs)
        except NotImplementedError as error:
            logger.debug("%s: %s declines: %s", op_name, name, error)
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"{op_name}: no implementation takes these inputs: {reasons}")
