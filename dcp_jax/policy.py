"""How a prefill meets the cache: the paths, what each costs, and the predicates that choose one.

Plain Python: no jax. With W = dcp_size, N = tp, H = heads of one rank (so W*H gathered heads),
n = query tokens of the batch, S = keys over its rows, s = mean visible keys per query token,
K = index_topk, D = kv_lora_rank + qk_rope_head_dim, d = qk_head_dim + v_head_dim, Hi/Di = index
heads and dim, b/bi = bytes of a latent and of an index row; per full layer and rank:

    path                     attention FLOPs     indexer FLOPs   received over `dcp`
    MHA_ONE_SHOT             2 n s H d           0               (W-1)/W * prefix * b
                             + 2 S H (d_nope + d_v) c (up-projection of the keys)
    GATHERED                 4 n K H D           2 n s Hi Di     (W-1)/W * S * (b + bi)
    GATHERED_SPLIT_INDEXER   4 n K H D           2 n s Hi Di / W (W-1)/W * (S * (b + bi) + 4 n K)
    OWNED                    4 n K H D (W heads' worth over 1/W of the keys)
                                                 2 n s Hi Di / W (W-1) * n * (2 H D * 2 + 6 K/W)

`MHA_ONE_SHOT` is exact while every visible key would be selected (kv_len <= K). `OWNED` moves
queries, the others move keys: it wins when the prefix is long beside the new tokens. Splitting the
indexer pays once scoring takes longer than the exchange of the selected positions.
"""

import enum
from dataclasses import dataclass
from numbers import Integral, Real


class PrefillPath(enum.Enum):
    """How the queries of a step reach keys that other ranks own.

    MHA_ONE_SHOT: un-absorbed dense attention over the gathered prefix and the new tokens; nothing
        is scored (index keys are still written).
    GATHERED: latent KV and index keys are all-gathered in bounded chunks; each rank scores every
        query and attends with its own heads.
    GATHERED_SPLIT_INDEXER: the same, but each rank scores 1/W of the queries and the selected
        positions are all-gathered.
    OWNED: each rank attends with the heads of the whole DCP group over the rows it owns, and the
        partial results are merged; no key moves. Decode is this path.
    """

    MHA_ONE_SHOT = "mha_one_shot"
    GATHERED = "gathered"
    GATHERED_SPLIT_INDEXER = "gathered_split_indexer"
    OWNED = "owned"

    @property
    def gathers(self) -> bool:
        """Whether latent rows of a selection are gathered (the `GATHERED` kinds)."""
        return self in (PrefillPath.GATHERED, PrefillPath.GATHERED_SPLIT_INDEXER)


@dataclass(frozen=True)
class Parallelism:
    """What the choice needs to know of model and mesh.

    Attributes:
        dcp_size: ranks of the DCP group, W.
        gathered_heads: (padded) attention heads of the whole DCP group.
        index_topk: keys that a query selects, K.
    """

    dcp_size: int
    gathered_heads: int
    index_topk: int


@dataclass(frozen=True)
class PrefillBatch:
    """Tokens of one prefill step: `prefixes[i]` cached and `extends[i]` new ones in row i."""

    prefixes: tuple[int, ...]
    extends: tuple[int, ...]

    @property
    def kv_len(self) -> int:
        """Keys of the longest row."""
        return max((p + e for p, e in zip(self.prefixes, self.extends, strict=True)), default=0)

    @property
    def prefix_tokens(self) -> int:
        """Cached tokens over all rows."""
        return sum(self.prefixes)

    @property
    def extend_tokens(self) -> int:
        """New tokens over all rows."""
        return sum(self.extends)

    @property
    def mean_keys(self) -> float:
        """Visible keys of a query token, on average."""
        rows = zip(self.prefixes, self.extends, strict=True)
        visible = sum(e * p + e * (e + 1) // 2 for p, e in rows)
        return visible / max(self.extend_tokens, 1)


@dataclass(frozen=True)
class PrefillPolicy:
    """Thresholds of the choice.

    Attributes:
        dense_attn_kv_len_threshold: `MHA_ONE_SHOT` up to this many keys in the longest row (and up
            to `index_topk`, where it stops being exact).
        allow_dense_beyond_topk: use `MHA_ONE_SHOT` up to the threshold even beyond `index_topk`: an
            approximation of the model, which would attend to `index_topk` keys only.
        split_indexer_min_kv: `GATHERED_SPLIT_INDEXER` from this many visible keys per query token.
        owned_prefill_ratio: `OWNED` if the prefix has at least this many tokens per gathered head
            and new token: queries are then cheaper to move than keys.
        gather_chunk_tokens: keys gathered at a time, over all ranks and rows; bounds memory.
        force: always this path (a `PrefillPath` or its name); refused where it is not eligible.
    """

    dense_attn_kv_len_threshold: int = 2048
    allow_dense_beyond_topk: bool = False
    split_indexer_min_kv: int = 8192
    owned_prefill_ratio: float = 3.0
    gather_chunk_tokens: int = 32768
    force: PrefillPath | None = None

    def __post_init__(self):
        for name in ("dense_attn_kv_len_threshold", "split_indexer_min_kv"):
            if not _is_whole(value := getattr(self, name)) or value < 0:
                raise ValueError(
                    f"{name}={value!r} is not a number of keys: give a whole number, 0 or more."
                )
        if not isinstance(self.allow_dense_beyond_topk, bool):
            raise ValueError(
                f"allow_dense_beyond_topk={self.allow_dense_beyond_topk!r} is not a switch: give "
                "True or False."
            )
        if not _is_number(self.owned_prefill_ratio) or not self.owned_prefill_ratio >= 0:
            raise ValueError(
                f"owned_prefill_ratio={self.owned_prefill_ratio!r} is not a number of prefix "
                "tokens per gathered head and new token: give 0 or more."
            )
        if not _is_whole(self.gather_chunk_tokens) or self.gather_chunk_tokens < 1:
            raise ValueError(
                f"gather_chunk_tokens={self.gather_chunk_tokens!r} gathers nothing: give a whole "
                "number of at least 1."
            )
        if self.force is not None:
            try:
                object.__setattr__(self, "force", PrefillPath(self.force))
            except ValueError:
                paths = [path.value for path in PrefillPath]
                raise ValueError(
                    f"force={self.force!r} is not a prefill path: use one of {paths}, or None to "
                    "choose by the thresholds."
                ) from None

    def dense_limit(self, index_topk: int) -> int:
        """Keys up to which `MHA_ONE_SHOT` may be taken: exact, unless asked otherwise."""
        if self.allow_dense_beyond_topk:
            return self.dense_attn_kv_len_threshold
        return min(self.dense_attn_kv_len_threshold, index_topk)


def _is_whole(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def ineligible(
    path: PrefillPath, policy: PrefillPolicy, kv_len: int, group: Parallelism
) -> str | None:
    """Why a batch whose longest row has `kv_len` keys cannot take `path`; None if it can."""
    if path is PrefillPath.MHA_ONE_SHOT:
        if kv_len > group.index_topk and not policy.allow_dense_beyond_topk:
            return (
                f"{kv_len} keys are more than index_topk={group.index_topk}, where dense attention "
                "is no longer what the model computes: choose another path, or set "
                "allow_dense_beyond_topk"
            )
    elif path.gathers and group.dcp_size == 1:
        return (
            "with dcp_size=1 the one rank owns every row and nothing is gathered: leave force out, "
            "or raise dcp_size"
        )
    return None


def check_forced(policy: PrefillPolicy, kv_len: int, group: Parallelism) -> None:
    """Refuse a prompt of `kv_len` tokens that the forced path cannot take.

    Raises:
        ValueError: says why, and what to do.
    """
    if policy.force is not None:
        reason = ineligible(policy.force, policy, kv_len, group)
        if reason is not None:
            raise ValueError(f"prefill.force={policy.force.value!r}: {reason}.")


def choose_path(policy: PrefillPolicy, batch: PrefillBatch, group: Parallelism) -> PrefillPath:
    """The path of one batch.

    Every argument is identical on every rank (over `dp` too), so the choice is.

    Raises:
        ValueError: the forced path is not eligible.
    """
    if policy.force is not None:
        check_forced(policy, batch.kv_len, group)
        return policy.force
    if batch.kv_len <= policy.dense_limit(group.index_topk):
        return PrefillPath.MHA_ONE_SHOT
    if group.dcp_size == 1:
        return PrefillPath.OWNED
    moved_queries = policy.owned_prefill_ratio * group.gathered_heads * batch.extend_tokens
    if batch.prefix_tokens >= moved_queries:
        return PrefillPath.OWNED
    if batch.mean_keys >= policy.split_indexer_min_kv:
        return PrefillPath.GATHERED_SPLIT_INDEXER
    return PrefillPath.GATHERED
