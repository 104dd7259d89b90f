"""The JSON files beside a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; {} if there is no such file.

    Raises:
        ValueError: the file is not JSON, or holds something else than an object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch it again.") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} holds a {type(value).__name__}, not a JSON object: fetch it again."
        )
    return value
