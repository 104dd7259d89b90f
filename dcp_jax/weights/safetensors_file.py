"""Safetensors files read by slices, through one memory map per file.

Contract: names, shapes and dtypes come from the JSON headers, so a checkpoint is checked before a
byte of its data is read; `read` touches only the pages that a slice needs. The dtypes are
`ml_dtypes` views, which is why the library's own numpy path (no fp8 in it) is not used.

Invariant: every tensor's extent lies inside its file and fits its shape, or opening raises one
ValueError that names the file.
"""

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A header of the largest released checkpoint is a few MB; the format's own limit is 100 MB.
_MAX_HEADER_BYTES = 100_000_000

# By the names of the format.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: the dtype by its safetensors name, bytes [begin, end)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass
class TensorFile:
    """One safetensors file: `tensors` by name, `read` for views of their data.

    `bytes_read` counts what the slices asked for, so tests and progress bars can tell what a rank
    reads.
    """

    path: Path
    tensors: dict[str, TensorInfo] = field(init=False)
    bytes_read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Parses and checks the header; maps the file without reading its data."""
        self.tensors = _read_header(self.path)
        self._lock = threading.Lock()
        self._map = np.memmap(self.path, dtype=np.uint8, mode="r").view(np.ndarray)

    def read(
        self,
        name: str,
        index: tuple[slice, ...] = (),
        view_shape: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """A read-only view of `tensor.reshape(view_shape)[index]`, nothing copied.

        Args:
            name: a key of `tensors`.
            index: slices over the leading axes of the view; missing ones take everything.
            view_shape: another shape of as many elements (default: the tensor's own).
        """
        info = self.tensors[name]
        data = self._map[info.begin : info.end].view(DTYPES[info.dtype])
        part = data.reshape(info.shape if view_shape is None else view_shape)[(*index, ...)]
        with self._lock:
            self.bytes_read += part.nbytes
        return part


class Checkpoint:
    """All safetensors files of a directory as one set of named tensors.

    Takes `model.safetensors`, else the files that `model.safetensors.index.json` names, else every
    `*.safetensors` there is.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        paths, expected = _find_files(self.directory)
        self.files = [TensorFile(path) for path in paths]
        self._file_of: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._file_of:
                    first = self._file_of[name].path.name
                    raise ValueError(
                        f"{self.directory}: tensor {name} is in both {first} and {file.path.name};"
                        " remove the file that does not belong to this checkpoint"
                    )
                self._file_of[name] = file
        lost = [name for name in expected if name not in self._file_of]
        if lost:
            raise ValueError(
                f"{self.directory / INDEX_FILE} names {len(lost)} tensors that none of its files"
                f" holds ({', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}); download the"
                " checkpoint again"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._file_of[name].tensors[name]

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file_of[name].path

    def read(
        self,
        name: str,
        index: tuple[slice, ...] = (),
        view_shape: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """See `TensorFile.read`."""
        return self._file_of[name].read(name, index, view_shape)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data asked for so far, over all files."""
        return sum(file.bytes_read for file in self.files)


def _find_files(directory: Path) -> tuple[list[Path], list[str]]:
    """The files to open, and the tensor names that an index promises (none without an index)."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give one with config.json and weights")
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE], []
    index_path = directory / INDEX_FILE
    if index_path.is_file():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            paths = [directory / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index_path} is not a safetensors index ({error!r}); it needs a weight_map of"
                " tensor names to file names"
            ) from error
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ValueError(
                f"{directory} lacks {len(absent)} of the {len(paths)} files that {INDEX_FILE} names"
                f" ({', '.join(absent[:5])}{', ...' if len(absent) > 5 else ''}); download them"
            )
        return paths, sorted(weight_map)
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"{directory} holds no weights: neither {SINGLE_FILE}, nor {INDEX_FILE}, nor any other"
            " .safetensors file; download them, or convert other formats to safetensors"
        )
    return paths, []


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Name -> TensorInfo with file offsets; one ValueError when the file cannot be right."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise ValueError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`")
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is truncated or not a safetensors file: its {size} bytes cannot hold a"
                f" header of {header_bytes} bytes; download it again"
            )
        raw = stream.read(header_bytes)
    data_start = 8 + header_bytes
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(
                name,
                entry["dtype"],
                tuple(int(n) for n in entry["shape"]),
                data_start + int(entry["data_offsets"][0]),
                data_start + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} is corrupt: its header is not a safetensors header ({error!r}); download it"
            " again"
        ) from error
    filled = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.dtype not in DTYPES:
            raise ValueError(
                f"{path}: tensor {info.name} has the dtype {info.dtype}, which is not known; known"
                f" are {', '.join(DTYPES)}"
            )
        if info.end > size:
            raise ValueError(
                f"{path} is truncated: it has {size} bytes, and tensor {info.name} ends at byte"
                f" {info.end}; download it again"
            )
        wanted = math.prod(info.shape) * DTYPES[info.dtype].itemsize
        if (
            info.begin < data_start
            or info.end - info.begin != wanted
            or min(info.shape, default=0) < 0
        ):
            raise ValueError(
                f"{path} is corrupt: tensor {info.name} ({info.dtype}, {list(info.shape)}) takes"
                f" {wanted} bytes, and its offsets span {info.end - info.begin}; download it again"
            )
        if info.begin < filled:
            raise ValueError(
                f"{path} is corrupt: the bytes of tensor {info.name} from {info.begin} on are also"
                " another tensor's; download it again"
            )
        filled = info.end
    return tensors
