"""Floating-point operations of a part on one rank, by path: the model of `policy`, exact in sizes.

With n query tokens, s mean visible keys of one, k = mean min(visible, index_topk), S keys over all
rows, H heads of the rank, c = kv_lora_rank, R, nope, v the rotary, plain and value head dims:

    attention  MHA_ONE_SHOT   2 n s H (nope + R + v) + 2 S H (nope + v) c
               the others     2 n k H (2 c + R)      + 2 n H (nope + v) c
    indexer    2 n s Hi Di (GATHERED), / W (GATHERED_SPLIT_INDEXER, OWNED), 0 (MHA_ONE_SHOT, or a
               layer that shares a selection)
    linear     2 n (projections of attention and indexer), + 6 n d I of the feed-forward part

`OWNED` attends with W times the heads over 1/W of the keys: the same number on average. Without
padding; norms, rotations, quantisation and top-k are not counted.
"""

from dcp_jax.bench.cases import Case
from dcp_jax.config import ModelConfig
from dcp_jax.policy import PrefillPath


def selected_keys(case: Case, index_topk: int) -> float:
    """Keys that a query token attends to, on average: min(visible, index_topk)."""
    first, last = case.prefix + 1, case.keys
    short = max(min(last, index_topk) - first + 1, 0)  # tokens that see index_topk keys or fewer
    few = short * (first + first + short - 1) / 2
    return (few + (case.extend - short) * index_topk) / case.extend


def flops(
    cfg: ModelConfig,
    case: Case,
    path: PrefillPath,
    *,
    tp: int,
    heads: int,
    dcp_size: int,
    full: bool,
    feed_forward: str,
) -> dict[str, float]:
    """FLOPs of one layer on one rank: "attention", "indexer", "linear".

    Args:
        cfg: the model.
        case: the batch.
        path: how it meets the cache.
        tp: ranks that share the weights.
        heads: (padded) heads of one rank.
        dcp_size: W.
        full: the layer has an indexer.
        feed_forward: "none" (attention alone), "dense" or "sparse".
    """
    n, s = case.tokens.extend_tokens, case.tokens.mean_keys
    rank, rope = cfg.kv_lora_rank, cfg.qk_rope_head_dim
    nope, value = cfg.qk_nope_head_dim, cfg.v_head_dim
    if path is PrefillPath.MHA_ONE_SHOT:
        keys = case.batch * case.keys
        attention = 2 * n * s * heads * (nope + rope + value)
        attention += 2 * keys * heads * (nope + value) * rank
    else:
        chosen = selected_keys(case, cfg.index_topk)
        attention = 2 * n * chosen * heads * (2 * rank + rope)
        attention += 2 * n * heads * (nope + value) * rank

    hidden, latent = cfg.hidden_size, cfg.q_lora_rank
    weights = hidden * (latent + rank + rope)
    weights += heads * (latent * (nope + rope) + hidden * value)
    scored = 0.0
    if full:
        weights += hidden * cfg.index_head_dim
        if path is not PrefillPath.MHA_ONE_SHOT:
            weights += cfg.index_n_heads * (latent * cfg.index_head_dim + hidden)
            share = 1 if path is PrefillPath.GATHERED else dcp_size
            scored = 2 * n * s * cfg.index_n_heads * cfg.index_head_dim / share
    chosen_experts = cfg.num_experts_per_tok + cfg.n_shared_experts
    width = {
        "none": 0,
        "dense": cfg.intermediate_size,
        "sparse": chosen_experts * cfg.moe_intermediate_size,
    }[feed_forward]
    linear = 2 * n * weights + 6 * n * hidden * width / tp
    return {"attention": float(attention), "indexer": float(scored), "linear": float(linear)}
