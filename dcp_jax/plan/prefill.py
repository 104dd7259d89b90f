"""Which prefill steps can occur, and the largest of each path: the policy's predicates, asked.

The engine reads one prompt per step, in chunks. With e new tokens behind p cached ones, p + e up to
the longest request, the paths follow one another as p grows: dense, gathered (whole, then split),
owned. So of each path the step with the most new tokens is known, and `choose_path` says whether
there is such a step at all:

    MHA_ONE_SHOT             e <= dense limit
    GATHERED                 e <= 2 split_indexer_min_kv - 2, behind as few tokens as are too many
                             for dense attention (a mean of fewer keys than split_indexer_min_kv)
    GATHERED_SPLIT_INDEXER   e <= 2 (longest request - split_indexer_min_kv) + 1, behind as many
                             tokens as there can be
    OWNED                    e <= longest request / (1 + owned_prefill_ratio * gathered heads)
"""

import math
from collections.abc import Callable

from dcp_jax.config import ModelConfig
from dcp_jax.plan.memory import Layout
from dcp_jax.policy import (
    Parallelism,
    PrefillBatch,
    PrefillPath,
    PrefillPolicy,
    check_forced,
    choose_path,
    ineligible,
)


def group_of(cfg: ModelConfig, layout: Layout) -> Parallelism:
    """What the policy needs to know of the layout."""
    return Parallelism(layout.dcp_size, layout.heads(cfg) * layout.dcp_size, cfg.index_topk)


def largest_prefills(
    policy: PrefillPolicy, group: Parallelism, longest: int, chunk: int
) -> dict[PrefillPath, PrefillBatch]:
    """Of each path that can occur, the one-prompt step with the most new tokens.

    Args:
        policy: the thresholds.
        group: model and mesh.
        longest: tokens of the longest request.
        chunk: new tokens of a step at most.

    Raises:
        ValueError: the forced path is eligible for no prompt.
    """
    if policy.force is not None:
        if ineligible(policy.force, policy, longest, group):
            longest = min(longest, group.index_topk)  # longer prompts are refused one by one
        check_forced(policy, longest, group)
        new = min(chunk, longest)
        return {policy.force: PrefillBatch((longest - new,), (new,))}
    dense = min(policy.dense_limit(group.index_topk), longest)
    moved = policy.owned_prefill_ratio * group.gathered_heads if group.dcp_size > 1 else 0.0

    # Of each path the most new tokens, and the tokens before them.
    def fewer_than(keys: float) -> int:
        return math.ceil(min(keys, longest + 1)) - 1

    steps: dict[PrefillPath, tuple[int, Callable[[int], int]]] = {
        PrefillPath.MHA_ONE_SHOT: (dense, lambda new: dense - new),
        PrefillPath.GATHERED: (
            2 * policy.split_indexer_min_kv - 2,
            lambda new: max(0, dense + 1 - new),
        ),
        PrefillPath.GATHERED_SPLIT_INDEXER: (
            2 * (longest - policy.split_indexer_min_kv) + 1,
            lambda new: min(longest - new, fewer_than(moved * new)),
        ),
        PrefillPath.OWNED: (math.floor(longest / (1 + moved)), lambda new: longest - new),
    }
    found = {}
    for path, (most, before) in steps.items():
        for limit in (most + 1, most, most - 1):  # the ratio is a float, and may be rounded
            new = min(chunk, longest, limit)
            if new < 1 or not 0 <= before(new) <= longest - new:
                continue
            batch = PrefillBatch((before(new),), (new,))
            if choose_path(policy, batch, group) is path:
                found[path] = batch
                break
    return found
