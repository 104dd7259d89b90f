"""What a bench writes: one JSON object per case, part and path, with all that it depends on."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from dcp_jax.bench.cases import Case, Shape
from dcp_jax.policy import Parallelism, PrefillPath


@dataclass(frozen=True)
class Setup:
    """Machine, model and options: records of one setup can be compared.

    Attributes:
        device: kind of the devices.
        jax: version.
        model: name of the config, or directory of the checkpoint.
        weights: "random" (layers then have dense feed-forward parts) or "checkpoint".
        timed_layers: layers of the timed step and of the caches.
        tp: devices in all.
        dcp_size: W.
        gathered_heads: (padded) heads of a DCP group.
        index_topk: K.
        dtype: of weights and activations.
        kv_cache_dtype: of both caches.
        index_cache: "sharded" or "replicated".
        dcp_comm: collectives of the merge.
        page_size: rows of a page on each rank.
    """

    device: str
    jax: str
    model: str
    weights: Literal["random", "checkpoint"]
    timed_layers: int
    tp: int
    dcp_size: int
    gathered_heads: int
    index_topk: int
    dtype: str
    kv_cache_dtype: str
    index_cache: str
    dcp_comm: str
    page_size: int

    @property
    def group(self) -> Parallelism:
        """What the policy needs to know."""
        return Parallelism(self.dcp_size, self.gathered_heads, self.index_topk)

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.weights} weights, {self.dtype} with {self.kv_cache_dtype} "
            f"caches, tp={self.tp} dcp_size={self.dcp_size} on {self.device}, jax {self.jax}"
        )


@dataclass(frozen=True)
class Times:
    """Seconds of one run: median, fastest and slowest of `repeats`."""

    median: float
    fastest: float
    slowest: float
    repeats: int


@dataclass(frozen=True)
class Agreement:
    """How the output compares with that of `reference`, token by token.

    Attributes:
        reference: path compared with.
        off: share of tokens whose relative error exceeds the limit of the dtype.
        worst: largest relative error of a token.
        cosine: of all outputs together.
        sampled: query tokens whose selected sets were compared; 0 if none was.
        near_ties: those of them whose margin at the last place is within rounding (float32 only).
        unequal_sets: those of the others (in low precision, of all) with another set.
        missed: share of selected keys that only one of the two has, over the sampled tokens.
        uncertified: tokens whose pruned candidates may have missed a key (the engine reruns them).
        agrees: all of it is within the limits.
    """

    reference: PrefillPath
    off: float
    worst: float
    cosine: float
    sampled: int
    near_ties: int
    unequal_sets: int
    missed: float
    uncertified: int
    agrees: bool


@dataclass(frozen=True)
class Record:
    """One path of one part of one case.

    Attributes:
        setup: what it ran on.
        date: of the run, UTC.
        case: the batch.
        shape: as the runner pads it.
        part: "attention" of one layer, "layer", or "step" (`timed_layers`, embedding and head).
        layer: "full" (with an indexer), "shared" (reuses a selection), or "all" for a step.
        stands_for: layers of that kind in the whole model; 1 for a step.
        feed_forward: "none" in the attention part, else "dense", "sparse", or "mixed" in a step.
        path: how the batch meets the cache.
        gather_chunk_tokens: of the `GATHERED` kinds, else None.
        chosen: the default policy takes this path.
        skipped: why it was not timed, or None.
        times: seconds.
        ratio: median over the best median of the same part and case.
        agreement: with the first path of the same part and case; None for that path itself.
        received_bytes: what one rank received, by kind of exchange (from the traced program).
        flops: of one rank and layer, by the cost model of `bench.cost`; empty for a step.
        temp_bytes: peak of temporary memory on a rank (from the compiled program).
        ttft_estimate: seconds of all layers of the model with this path, if they were timed:
            sum over kinds of `stands_for` x layer median, without embedding and head.
    """

    setup: Setup
    date: str
    case: Case
    shape: Shape
    part: Literal["attention", "layer", "step"]
    layer: Literal["full", "shared", "all"]
    stands_for: int
    feed_forward: Literal["none", "dense", "sparse", "mixed"]
    path: PrefillPath
    gather_chunk_tokens: int | None
    chosen: bool
    skipped: str | None = None
    times: Times | None = None
    ratio: float | None = None
    agreement: Agreement | None = None
    received_bytes: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    temp_bytes: int | None = None
    ttft_estimate: float | None = None

    @property
    def variant(self) -> tuple[PrefillPath, int | None]:
        """What is compared within a case: the path, with its chunk if it gathers."""
        return self.path, self.gather_chunk_tokens


def write_records(path: str | Path, records: Iterable[Record]) -> None:
    """Append records to a JSONL file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def read_records(*paths: str | Path) -> list[Record]:
    """Records of JSONL files, in order.

    Raises:
        ValueError: a file that cannot be read, or a line that is no record.
    """
    records = []
    for path in paths:
        try:
            lines = Path(path).read_bytes().splitlines()
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): give a file that bench prefill wrote "
                "with --output."
            ) from None
        for number, line in enumerate(lines, start=1):
            try:
                records.append(msgspec.json.decode(line, type=Record))
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"{path}, line {number} is no record of bench prefill ({error}): remove the "
                    "line, or give another file."
                ) from None
    return records
