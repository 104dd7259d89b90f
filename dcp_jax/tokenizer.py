"""Text to ids and back, by the checkpoint's `tokenizer.json`."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenizers import Tokenizer as HfTokenizer


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, the checkpoint's own special tokens added."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens."""
        ...


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library."""

    def __init__(self, path: Path):
        """Raises ValueError if the file cannot be read as a tokenizer."""
        try:
            self._tokenizer = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer ({error}): fetch it again.") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None if it has none (prompts are ids then)."""
    path = directory / "tokenizer.json"
    return FileTokenizer(path) if path.is_file() else None
