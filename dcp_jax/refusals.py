"""Sentences for what is known and not supported: on the command line and as keyword arguments.

`refusals_table.py` is the data. Plain Python: a command line is refused before jax is imported.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from dcp_jax.refusals_table import TABLE, Refusal


class Given(NamedTuple):
    """A flag of a command line that the table knows.

    Attributes:
        refusal: its entry.
        shown: the flag as it was written, with its value.
        value: the value as lower-case text; "true" for a bare switch, "false" for `--no-...`.
        start: where it stands in the arguments.
        stop: where the next argument stands.
    """

    refusal: Refusal
    shown: str
    value: str
    start: int
    stop: int


_BY_FLAG = {flag: refusal for refusal in TABLE for flag in refusal.flags}
_TEXT_FLAGS = ("--prompt", "--prompt-ids", "--message", "--system", "--stop")
_NEGATIVE_NUMBER = re.compile(r"-\d")


def find_unsupported(argv: Iterable[str], known: Collection[str] = ()) -> list[str]:
    """One sentence for each argument that asks for something known and not supported.

    Args:
        argv: arguments after the program's name.
        known: flags that the command itself has, which are then refused for their value only.
    """
    given = list(argv)
    return [
        _sentence(found.refusal, found.shown, lambda names: _beside(given, names))
        for found in _scan(given, known)
        if found.refusal.applies(found.value)
    ]


def supported(argv: Iterable[str], known: Collection[str] = ()) -> list[str]:
    """`argv` without what `find_unsupported` refuses, and without what asks for nothing special.

    What is left is for the parser of the command line, which knows neither `--pp-size 1` nor
    `--pp-size 2`.
    """
    argv = list(argv)
    kept = list(argv)
    for found in reversed(list(_scan(argv, known))):
        if not found.refusal.ours or found.refusal.applies(found.value):
            del kept[found.start : found.stop]
    return kept


def check_keywords(
    kwargs: Mapping[str, Any],
    context: Mapping[str, Any] | None = None,
    accepted: Collection[str] = (),
) -> None:
    """Refuse keyword arguments that a function does not have.

    Args:
        kwargs: the arguments that are left over; those that ask for nothing special pass.
        context: the function's own arguments, named in a sentence that concerns them.
        accepted: names of the function's own arguments, to suggest one for a misspelt name.

    Raises:
        ValueError: known and not supported: one line for each.
        TypeError: a name that nobody knows.
    """
    given = {**(context or {}), **kwargs}

    def beside(names: tuple[str, ...]) -> str | None:
        found = [keyword(name) for name in names if given.get(keyword(name)) is not None]
        return f"{found[0]}={given[found[0]]!r}" if found else None

    by_keyword = {keyword(flag): refusal for flag, refusal in _BY_FLAG.items()}
    problems, strangers = [], []
    for name, value in kwargs.items():
        refusal = by_keyword.get(name)
        if refusal is None:
            strangers.append(name)
        elif refusal.applies(str(value).lower()):
            problems.append(_sentence(refusal, f"{name}={value!r}", beside))
    if strangers:
        close = difflib.get_close_matches(strangers[0], accepted, 1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"unexpected keyword argument {strangers[0]!r}{hint}")
    if problems:
        raise ValueError("\n".join(problems))


def keyword(flag: str) -> str:
    """The keyword argument of a flag: `--enable-lora` is `enable_lora`."""
    return flag.lstrip("-").replace("-", "_")


def _sentence(refusal: Refusal, shown: str, beside) -> str:
    other = beside(refusal.beside) if refusal.beside else None
    clause = f" with {other}" if other else ""
    way_out = f"{refusal.fix}, or {refusal.alternative}" if refusal.alternative else refusal.fix
    return f"DCP: {shown} is not supported{clause}: {refusal.mechanism}. Use {way_out}."


def _scan(argv: list[str], known: Collection[str]) -> Iterable[Given]:
    """The arguments that the table knows, in their order."""
    at = 0
    while at < len(argv) and argv[at] != "--":
        flag, equals, value = argv[at].partition("=")
        spelt = _spelling(flag)
        refusal, negated = _entry(spelt)
        start, at = at, at + 1
        if spelt in _TEXT_FLAGS and not equals:
            at += 1  # what follows is a text, whatever it looks like
        if refusal is None or (spelt in known and not refusal.ours):
            continue
        values = [value] if equals else []
        if not equals and refusal.takes != "none":
            most = len(argv) if refusal.takes == "many" else 1
            while at < len(argv) and len(values) < most and not _is_flag(argv[at]):
                values.append(argv[at])
                at += 1
        shown = flag + (f"={' '.join(values)}" if values else "")
        text = " ".join(values).lower() if values else "true"
        if negated:
            text = "true" if text == "false" else "false"
        yield Given(refusal, shown, text, start, at)


def _spelling(flag: str) -> str:
    """`--kv_cache_dtype` is `--kv-cache-dtype`, as vLLM and tyro have it."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _entry(flag: str) -> tuple[Refusal | None, bool]:
    """The entry of a flag, and whether it is there as `--no-...`; `--a.b` falls back to `--a`."""
    if not flag.startswith("-"):
        return None, False
    for name in (flag, flag.partition(".")[0]):
        if name in _BY_FLAG:
            return _BY_FLAG[name], False
    positive = "--" + flag.removeprefix("--no-")
    if flag.startswith("--no-") and positive in _BY_FLAG:
        return _BY_FLAG[positive], True
    return None, False


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and not _NEGATIVE_NUMBER.match(argument)


def _beside(argv: list[str], names: tuple[str, ...]) -> str | None:
    """`flag=value` of the last of `names` on the command line."""
    for at in reversed(range(len(argv))):
        flag, equals, value = argv[at].partition("=")
        if _spelling(flag) in names:
            following = argv[at + 1] if at + 1 < len(argv) else ""
            return f"{flag}={value if equals else following}"
    return None
