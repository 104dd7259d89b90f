"""Memory of a step beside weights and caches, by stage and part, at the head counts DCP gathers.

Sizing by a rank's own heads is the classic mistake: with W ranks the queries and partial outputs of
`W * heads/N` heads exist at once. The parts are those of the XLA implementations, where an op that
works in blocks holds its budget (64 MiB), or one query's worth where that is more. The peak is an
upper bound: within a stage everything counts as alive together.
"""

from dataclasses import dataclass

from dcp_jax.config import ModelConfig
from dcp_jax.plan.exchange import StepShape, candidates
from dcp_jax.plan.memory import CacheBytes, Layout, sizes
from dcp_jax.policy import PrefillPath

BUDGET = 64 * 2**20  # `pallas_kernels.blocking.BUDGET_BYTES`
_COPIES = 3  # of gathered rows: the own ones, all as received, all in order of position


@dataclass(frozen=True)
class Workspace:
    """Bytes that one step needs on a rank.

    Attributes:
        throughout: parts held in every layer, name -> bytes.
        stages: stage -> its parts; stages follow one another.
    """

    throughout: dict[str, int]
    stages: dict[str, dict[str, int]]

    @property
    def peak(self) -> int:
        """The most that exists at one time."""
        return sum(self.throughout.values()) + sum(self.stages[self.peak_stage].values())

    @property
    def peak_stage(self) -> str:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: sum(self.stages[stage].values()))


def workspace(cfg: ModelConfig, layout: Layout, shape: StepShape) -> Workspace:
    """Stages and parts of one step of these shapes; parts that do not exist are left out."""
    n = shape.rows * shape.tokens
    if shape.path is PrefillPath.MHA_ONE_SHOT:
        stages = _dense(cfg, layout, shape)
    elif shape.path.gathers and layout.dcp_size > 1:
        stages = _gathered(cfg, layout, shape)
    else:
        stages = _owned(cfg, layout, shape)
    stages["feed-forward"] = _feed_forward(cfg, layout, n)
    vocab = sizes(cfg, layout).vocab // layout.tp
    stages["output head"] = {"logits": 2 * shape.rows * vocab * 4}
    if shape.sampled:  # gathered, edited, scaled, in order, with noise, mass and log-probabilities
        stages["sampling"] = {"whole logits and their copies": 8 * shape.rows * cfg.vocab_size * 4}
    return Workspace(
        {"residual, norm and output": 3 * n * cfg.hidden_size * layout.activation_bytes},
        {stage: {k: v for k, v in parts.items() if v} for stage, parts in stages.items()},
    )


def _blocks(queries: int, per_query: int) -> int:
    """What an op over `queries` queries holds at a time."""
    return max(per_query, min(BUDGET, queries * per_query))


def _own_queries(cfg: ModelConfig, layout: Layout, n: int) -> int:
    """Their latent, as projected, and in latent space."""
    row = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    per_token = cfg.q_lora_rank + layout.heads(cfg) * (cfg.qk_head_dim + row)
    return n * per_token * layout.activation_bytes


def _selection(
    cfg: ModelConfig, layout: Layout, rows: int, tokens: int, scored: int, keys: int
) -> dict[str, int]:
    """Index queries of `tokens` tokens a row; scores and top-k of `scored` of them.

    Scores are those of `keys` keys a row.
    """
    item, n, dim = layout.activation_bytes, rows * tokens, cfg.index_head_dim
    stored = 1 if layout.kv_dtype == "fp8_e4m3" else item
    products = keys * rows * (dim * 8 + 8 + scored * cfg.index_n_heads * 8)
    return {
        "own queries": _own_queries(cfg, layout, n),  # nothing orders them after the selection
        "index queries": n * cfg.index_n_heads * (dim * (item + stored) + 4),
        "index scores and their top-k": _blocks(rows * scored, keys * 24) + min(BUDGET, products),
    }


def _attention(cfg: ModelConfig, layout: Layout, n: int, heads: int, width: int) -> dict[str, int]:
    """Own queries, and attention of `heads` heads over `width` entries a query."""
    item, row = layout.activation_bytes, cfg.kv_lora_rank + cfg.qk_rope_head_dim
    return {
        "own queries": _own_queries(cfg, layout, n),
        "gathered rows": _blocks(n, width * (row * (2 * item + 4) + heads * 12)),
    }


def _dense(cfg: ModelConfig, layout: Layout, shape: StepShape) -> dict[str, dict[str, int]]:
    """Every key of a row at once: the policy bounds how many there are."""
    item, n, own = layout.activation_bytes, shape.rows * shape.tokens, layout.heads(cfg)
    row, value = cfg.kv_lora_rank + cfg.qk_rope_head_dim, cfg.v_head_dim
    keys, gathered = shape.tokens, 0
    if shape.with_prefix:
        keys = shape.pages * layout.page_tokens
        gathered = _COPIES * shape.rows * keys * CacheBytes.of(cfg, layout).latent_row
    # Of keys and values the product takes a transposed copy; the keys are put together of two.
    expanded = cfg.qk_nope_head_dim + 2 * cfg.qk_head_dim + 2 * value
    return {
        "attention": {
            "own queries": n * (cfg.q_lora_rank + 2 * own * cfg.qk_head_dim) * item,
            "gathered latents": gathered,
            "latents in floats": shape.rows * keys * row * (item + 4),
            "keys and values of own heads": shape.rows * keys * own * expanded * item,
            "scores": _blocks(n, keys * own * 12),
            "attention outputs": 2 * n * own * value * item,
        }
    }


def _owned(cfg: ModelConfig, layout: Layout, shape: StepShape) -> dict[str, dict[str, int]]:
    item, ranks, n = layout.activation_bytes, layout.dcp_size, shape.rows * shape.tokens
    rank, own = cfg.kv_lora_rank, layout.heads(cfg)
    heads, copies = own * ranks, ranks if layout.index_replicated else 1
    keys = shape.pages * layout.page_size * copies
    sharded = ranks > 1 and not layout.index_replicated
    top = min(cfg.index_topk, keys)
    pairs = min(candidates(cfg.index_topk, ranks), keys) if sharded else top
    partial = n * heads * (rank + 1) * 4
    if layout.dcp_comm == "a2a":  # sent, received, and received in float32
        exchanged = n * heads * (2 * (rank * item + 4) + rank * 4)
    else:
        exchanged = n * heads * (4 * ranks + rank * 4)
    selection = _selection(cfg, layout, shape.rows, shape.tokens, shape.tokens, keys)
    if sharded:
        selection["candidates of all ranks"] = n * pairs * 8 * (1 + 2 * ranks)
    attention = _attention(cfg, layout, n, heads, pairs)
    if ranks > 1:
        # As received and in order of heads.
        row = rank + cfg.qk_rope_head_dim
        attention["queries of gathered heads"] = 2 * n * heads * row * item
    # Partial outputs block by block, put together, and as the merge or the projection takes them.
    attention |= {"selection": n * pairs * 8, "partial outputs of gathered heads": 3 * partial}
    return {
        "selection": selection,
        "attention": attention,
        "merge and projection": {
            "partial outputs of gathered heads": partial if ranks > 1 else 0,
            "exchanged partial outputs": exchanged if ranks > 1 else 0,
            "attention outputs": n * own * (rank + cfg.v_head_dim) * item,
        },
    }


def _gathered(cfg: ModelConfig, layout: Layout, shape: StepShape) -> dict[str, dict[str, int]]:
    """One chunk of latents or index keys at a time, whatever the prefix."""
    item, ranks, n = layout.activation_bytes, layout.dcp_size, shape.rows * shape.tokens
    cache, rank, own = CacheBytes.of(cfg, layout), cfg.kv_lora_rank, layout.heads(cfg)
    chunks, width = shape.chunks(layout)
    split = shape.path is PrefillPath.GATHERED_SPLIT_INDEXER
    scored = -(-shape.tokens // ranks) if split else shape.tokens
    keys = shape.pages * layout.page_tokens if layout.index_replicated else width * ranks
    top = shape.selected(cfg, layout)
    selection = _selection(cfg, layout, shape.rows, shape.tokens, scored, keys)
    selection["selection in order"] = n * top * (4 if split else 3) * 4
    if not layout.index_replicated:
        lists = shape.rows * scored * top * 8  # (key, position) of each candidate
        selection["gathered index keys of a chunk"] = _COPIES * shape.rows * keys * cache.index_row
        selection["candidates"] = lists * (3 if chunks > 1 else 1)
        if chunks > 1:
            selection["candidates joined"] = min(BUDGET, 6 * lists)
    attention = _attention(cfg, layout, n, own, top) | {
        "gathered latents of a chunk": _COPIES * shape.rows * width * ranks * cache.latent_row,
        "selection": n * top * 20,
        # Of a chunk, of all before it, both side by side, and merged.
        "partial outputs": (5 if chunks > 1 else 3) * n * own * (rank + 1) * 4,
    }
    outputs = {"attention outputs": n * own * (rank + cfg.v_head_dim) * item}
    return {"selection": selection, "attention": attention, "projection": outputs}


def _feed_forward(cfg: ModelConfig, layout: Layout, n: int) -> dict[str, int]:
    """The larger of a dense and a sparse layer, if the model has both."""
    item, held, tp = layout.activation_bytes, sizes(cfg, layout), layout.tp
    hidden, pairs = n * cfg.hidden_size, n * cfg.num_experts_per_tok
    kinds = {
        "dense": {
            "dense activations": 3 * n * held.intermediate // tp * item,
            "output": hidden * item,
        },
        "sparse": {
            "router": n * (3 * cfg.n_routed_experts + cfg.hidden_size) * 4,
            "outputs of chosen experts": pairs * (cfg.hidden_size * item + 24),
            "shared expert activations": 3 * n * held.shared_intermediate // tp * item,
            "output": hidden * (4 + item),
        },
    }
    return max((kinds[kind] for kind in set(cfg.mlp_layer_types)), key=lambda p: sum(p.values()))
