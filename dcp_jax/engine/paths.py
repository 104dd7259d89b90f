"""Which program a prefill step takes: the policy, asked with what the engine knows."""

from collections.abc import Sequence
from typing import Any

from dcp_jax.layers.sizes import Sizes
from dcp_jax.mesh import DCP, tp_size
from dcp_jax.model import Model
from dcp_jax.policy import Parallelism, PrefillBatch, PrefillPath, PrefillPolicy, choose_path


def parallelism(model: Model) -> Parallelism:
    """What the policy needs to know of `model` and its mesh."""
    tp, dcp_size = tp_size(model.mesh), model.mesh.shape[DCP]
    heads = Sizes.padded(model.cfg, tp).heads * dcp_size // tp
    return Parallelism(dcp_size, heads, model.cfg.index_topk)


def possible_paths(policy: PrefillPolicy, group: Parallelism) -> tuple[PrefillPath, ...]:
    """The paths that `prefill_options` can give: what is compiled ahead."""
    if policy.force is not None:
        return (policy.force,)
    dense = (PrefillPath.MHA_ONE_SHOT,) * (policy.dense_limit(group.index_topk) > 0)
    if group.dcp_size == 1:
        return (*dense, PrefillPath.OWNED)
    return (*dense, *(path for path in PrefillPath if path is not PrefillPath.MHA_ONE_SHOT))


def longest_dense_row(policy: PrefillPolicy, group: Parallelism) -> int:
    """Keys of the longest row that `MHA_ONE_SHOT` may read under this policy."""
    if policy.force is PrefillPath.MHA_ONE_SHOT and not policy.allow_dense_beyond_topk:
        return group.index_topk
    return policy.dense_limit(group.index_topk)


def prefill_options(
    policy: PrefillPolicy, group: Parallelism, prefixes: Sequence[int], extends: Sequence[int]
) -> dict[str, Any]:
    """Fields of `StepOptions` for rows with `prefixes` cached and `extends` new tokens each.

    Raises:
        ValueError: the forced path is not eligible.
    """
    path = choose_path(policy, PrefillBatch(tuple(prefixes), tuple(extends)), group)
    return path_options(path, prefixes)


def path_options(path: PrefillPath, prefixes: Sequence[int]) -> dict[str, Any]:
    """Fields of `StepOptions` for a given path and rows with `prefixes` cached tokens each."""
    # Where nobody asks, both answers would be the same program compiled twice.
    asks = path is PrefillPath.MHA_ONE_SHOT
    return {"path": path, "with_prefix": any(prefixes) or not asks}
