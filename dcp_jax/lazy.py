"""Names of a package that are imported on first use, so that importing it starts nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    namespace: dict[str, Any], home: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
        namespace: its `globals()`; a name is kept there once it was asked for.
        home: public name -> module that has it.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        namespace[name] = getattr(import_module(home[name]), name)
        return namespace[name]

    return get, lambda: sorted({*namespace, *home})
