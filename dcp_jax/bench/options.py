"""Options of a bench, checked before a backend starts, and the model that they describe."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dcp_jax.bench.cases import PARTS, Case, grid
from dcp_jax.config import ModelConfig
from dcp_jax.configs import NAMES, named_config
from dcp_jax.dcp.step import DCP_COMMS, INDEX_CACHES
from dcp_jax.engine.options import KV_CACHE_DTYPES
from dcp_jax.mesh import check_sizes
from dcp_jax.policy import PrefillPath, PrefillPolicy


class TimedLayer(NamedTuple):
    """A layer that is timed by itself.

    Attributes:
        kind: "full" (has an indexer) or "shared" (reuses a selection).
        number: region of the latent cache; with a checkpoint, also whose weights.
        ordinal: region of the index cache.
        sparse: mixture of experts.
        stands_for: layers of this kind in the whole model.
    """

    kind: Literal["full", "shared"]
    number: int
    ordinal: int
    sparse: bool
    stands_for: int


@dataclass(frozen=True)
class PrefillOptions:
    """What `prefill` times, and on what.

    Attributes:
        model: a released model's name, a checkpoint directory, or a `config.json` as a dict.
        random_weights: weights are drawn on the devices; every feed-forward part is then dense,
            because 256 random experts a layer tell nothing about prefill paths and fill a device.
        layers: layers of the timed step and of the caches (random weights only); default: all.
        cases: batches.
        paths: which of them; those that a case is not eligible for are recorded with the reason.
        parts: "attention" and "layer" of one layer each, "step" of all `layers`.
        gather_chunk_tokens: values to time the `GATHERED` kinds with.
        repeats: runs that the median is over.
        tp: devices in all.
        dcp_size: W.
        dtype: of weights and activations; "auto" is the config's.
        kv_cache_dtype: of both caches; "auto" follows `dtype`.
        index_cache: indexer keys sharded over the ranks, or whole on each.
        dcp_comm: collectives of the merge.
        page_size: rows of a page on each rank.
        policy: the thresholds to compare with.
        seed: of weights, caches and inputs.
        progress: show a progress bar.
    """

    model: str | Path | Mapping[str, Any]
    random_weights: bool = False
    layers: int | None = None
    cases: tuple[Case, ...] = field(default_factory=lambda: grid((0, 8192, 32768), (512, 2048)))
    paths: tuple[PrefillPath, ...] = tuple(PrefillPath)
    parts: tuple[str, ...] = ("attention", "layer")
    gather_chunk_tokens: tuple[int, ...] = (32768,)
    repeats: int = 5
    tp: int = 1
    dcp_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    index_cache: str = "sharded"
    dcp_comm: str = "a2a"
    page_size: int = 64
    policy: PrefillPolicy = field(default_factory=PrefillPolicy)
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        self.whole_config()  # an unknown model is refused as such
        check_sizes(self.tp, self.dcp_size)
        for name in ("cases", "paths", "parts", "gather_chunk_tokens"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty, so nothing would be timed: give one or more.")
        try:
            object.__setattr__(self, "paths", tuple(map(PrefillPath, self.paths)))
        except ValueError as error:
            values = [path.value for path in PrefillPath]
            raise ValueError(f"{error}: use some of {values}.") from None
        for tokens in self.gather_chunk_tokens:
            PrefillPolicy(gather_chunk_tokens=tokens)
        allowed = {
            "parts": PARTS,
            "dtype": ("auto", "float32", "bfloat16"),
            "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
            "index_cache": INDEX_CACHES,
            "dcp_comm": DCP_COMMS,
        }
        for name, values in allowed.items():
            given = getattr(self, name)
            for value in given if name == "parts" else (given,):
                if value not in values:
                    raise ValueError(f"{name}={value!r} is not supported: use one of {values}.")
        counts = ("repeats", "page_size") + (() if self.layers is None else ("layers",))
        for name in counts:
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a count: give a whole number from 1.")
        if not self.random_weights and (self._named or self.layers is not None):
            reason = (
                f"{self.name} is a config without weights"
                if self._named
                else f"layers={self.layers} cuts the model, and a checkpoint is timed whole"
            )
            raise ValueError(
                f"{reason}: add random_weights (--random-weights), or give a checkpoint directory "
                "alone."
            )

    @property
    def _named(self) -> bool:
        return isinstance(self.model, Mapping) or not Path(self.model).is_dir()

    @property
    def name(self) -> str:
        """The model's name in records."""
        return "config" if isinstance(self.model, Mapping) else str(self.model)

    def whole_config(self) -> ModelConfig:
        """The model that thresholds are for.

        Raises:
            ValueError: no such config, or one that cannot be used.
        """
        if isinstance(self.model, Mapping) or Path(self.model).is_dir():
            return ModelConfig.from_hf(self.model)
        if str(self.model) not in NAMES:
            raise ValueError(
                f"{str(self.model)!r} is no directory and no released model known by name: use one "
                f"of {', '.join(NAMES)}, or a checkpoint directory."
            )
        return ModelConfig.from_hf(named_config(str(self.model)))

    def timed_config(self) -> ModelConfig:
        """The model that is timed: the first `layers` of it, dense ones if weights are random.

        Raises:
            ValueError: more layers than there are.
        """
        cfg = self.whole_config()
        if not self.random_weights:
            return cfg
        count = self.layers or cfg.num_hidden_layers
        if count > cfg.num_hidden_layers:
            raise ValueError(
                f"layers={count} is more than the {cfg.num_hidden_layers} of the config: give at "
                "most that."
            )
        return replace(
            cfg,
            num_hidden_layers=count,
            indexer_types=cfg.indexer_types[:count],
            mlp_layer_types=("dense",) * count,
            quantization=None,
        )

    def timed_layers(self) -> list[TimedLayer]:
        """One layer of each kind that the whole model has, those with an indexer first.

        Random weights may stand for a kind that the first `layers` do not have.
        """
        whole, cfg = self.whole_config(), self.timed_config()
        found = []
        for kind in ("full", "shared"):
            count = whole.indexer_types.count(kind)
            if not count:
                continue
            if self.random_weights:
                number, sparse = min(len(found), cfg.num_hidden_layers - 1), False
            else:
                number = cfg.indexer_types.index(kind)
                sparse = cfg.is_sparse(number)
            found.append(TimedLayer(kind, number, cfg.index_ordinal(number), sparse, count))
        return found

    def resolved_dtype(self) -> str:
        """The dtype of weights and activations."""
        return self.whole_config().dtype if self.dtype == "auto" else self.dtype

    def resolved_kv_dtype(self) -> str:
        """The dtype of both caches."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype] or self.resolved_dtype()

    def variants(self) -> list[tuple[PrefillPath, int | None]]:
        """Every path, the `GATHERED` kinds once per chunk size."""
        found: list[tuple[PrefillPath, int | None]] = []
        for path in self.paths:
            chunks = self.gather_chunk_tokens if path.gathers else (None,)
            found += [(path, chunk) for chunk in chunks]
        return found
