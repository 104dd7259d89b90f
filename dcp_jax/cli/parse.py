"""Arguments to a command: everything wrong with them is printed, then exit code 2.

No backend starts here and no checkpoint is read.
"""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from dcp_jax.refusals import find_unsupported, supported

_POSITIONAL = get_args(tyro.conf.Positional[int])[1]


def parse(commands: Mapping[str, type], args: list[str] | None, **options: Any) -> Any:
    """The command that `args` (default: the program's) describe.

    Args:
        commands: dataclasses by name.
        args: arguments after the program's name.
        **options: see `tyro.extras.subcommand_cli_from_dict`.
    """
    argv = sys.argv[1:] if args is None else list(args)
    if " ".join(argv[:2]) in commands:  # `bench prefill` is one command
        argv[:2] = [" ".join(argv[:2])]
    known = set(flags(commands[argv[0]])) if argv and argv[0] in commands else set()
    problems = find_unsupported(argv, known)
    _print(problems)  # now: the parser may exit over other arguments
    command = tyro.extras.subcommand_cli_from_dict(
        dict(commands), args=supported(argv, known), **options
    )
    wrong = _option_problems(getattr(command, "engine", None))
    _print([f"{problem}." for problem in wrong])
    if problems or wrong:
        sys.exit(2)
    return command


def flags(command: type, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """The options of a command by flag, aliases included: each the path of its field."""
    found: dict[str, tuple[str, ...]] = {}
    hints = get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        kind, notes = hints[field.name], ()
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
        name = field.name.replace("_", "-")
        for note in notes:
            given = getattr(note, "name", None)
            name = name if given is None else given
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            inner = flags(kind, f"{prefix}{name}." if name else prefix)
            found |= {flag: (field.name, *path) for flag, path in inner.items()}
            continue
        if _POSITIONAL in notes:
            continue
        aliases = [alias for note in notes for alias in getattr(note, "aliases", None) or ()]
        found |= dict.fromkeys((f"--{prefix}{name}", *aliases), (field.name,))
    return found


def _option_problems(engine: Any) -> list[str]:
    if engine is None:
        return []
    from dcp_jax.engine.options import option_problems

    options = {
        name: getattr(engine, name) for name in inspect.signature(option_problems).parameters
    }
    return option_problems(**options)


def _print(problems: list[str]) -> None:
    for problem in problems:
        print(f"dcp-jax: {problem}", file=sys.stderr)
