"""How a prefill meets the cache: the paths, and the pure predicates that choose one.

Plain Python: no jax. Bytes and FLOPs are per layer and rank; K = index_topk, W = dcp_size.
"""

import enum
from dataclasses import dataclass


class PrefillPath(enum.Enum):
    """How the queries of a step reach keys that other ranks own.

    GATHERED: the batch's latent KV is all-gathered in chunks and each rank attends with its own
        heads. Sends `(W-1)/W * kv_len * row_bytes`, whatever the number of query tokens.
    OWNED: each rank attends with the heads of the whole DCP group over the rows it owns, and the
        partial results are merged. Sends `(W-1) * T * heads/N * row_bytes`, whatever the prefix.
        Decode is this path with one query token per row.
    """

    GATHERED = "gathered"
    OWNED = "owned"


@dataclass(frozen=True)
class PrefillPolicy:
    """Thresholds of the choice.

    Attributes:
        owned_prefill_ratio: `OWNED` if the prefix has at least this many tokens per gathered head
            and new token: queries are then cheaper to move than keys.
        gather_chunk_tokens: keys gathered at a time by `GATHERED`; bounds its memory.
        force: always this path.
    """

    owned_prefill_ratio: float = 3.0
    gather_chunk_tokens: int = 32768
    force: PrefillPath | None = None

    def __post_init__(self):
        if not self.owned_prefill_ratio >= 0:
            raise ValueError(
                f"owned_prefill_ratio={self.owned_prefill_ratio} is negative: it is a number of "
                "prefix tokens per gathered head and new token; give 0 or more."
            )
        if not isinstance(self.gather_chunk_tokens, int) or self.gather_chunk_tokens < 1:
            raise ValueError(
                f"gather_chunk_tokens={self.gather_chunk_tokens} gathers nothing: give at least 1."
            )
        if self.force is not None and not isinstance(self.force, PrefillPath):
            paths = [path.value for path in PrefillPath]
            raise ValueError(f"force={self.force!r} is not a PrefillPath: use one of {paths}.")


def choose_path(
    policy: PrefillPolicy, *, prefix_tokens: int, extend_tokens: int, gathered_heads: int
) -> PrefillPath:
    """Path of one batch; `prefix_tokens` and `extend_tokens` are sums over its rows.

    `OWNED` moves about `gathered_heads * extend_tokens` rows, `GATHERED` about `prefix_tokens`.
    The arguments are identical on every rank, so the choice is too.
    """
    if policy.force is not None:
        return policy.force
    if prefix_tokens >= policy.owned_prefill_ratio * gathered_heads * extend_tokens:
        return PrefillPath.OWNED
    return PrefillPath.GATHERED
