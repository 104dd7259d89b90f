"""Sequences run step by step on a `Runner`, below the engine: for tests and notebooks.

runner = open_runner("checkpoint", tp=8, dcp_size=8)
sequences = deal(runner, [[1, 2, 3], [4, 5]], room=16)
advance(runner, sequences)                  # prefill; appends each sequence's next token
advance(runner, sequences, explain=True)    # one decode step
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from dcp_jax.cache.pool import CacheSpec
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import pages_needed
from dcp_jax.dcp.step import StepOptions
from dcp_jax.engine.runner import Row, Runner, StepResult
from dcp_jax.mesh import make_mesh
from dcp_jax.model import Explanation, Model
from dcp_jax.weights.hf import load_hf


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A small GLM-5 `config.json`: layers with and without an indexer, dense and sparse."""
    config = {
        "model_type": "glm_moe_dsa",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
        "indexer_types": ["full", "shared", "full"],
        "indexer_rope_interleave": True,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "eos_token_id": 1,
    }
    return {**config, **changes}


def open_runner(
    directory: str | Path,
    *,
    tp: int = 1,
    dcp_size: int = 1,
    tokens: int = 1024,
    page_size: int = 4,
    kv_dtype: Literal["float32", "bfloat16", "fp8_e4m3"] = "float32",
    dtype: Literal["float32", "bfloat16"] = "float32",
    with_mtp: bool = False,
    largest_step: int | None = None,
    **options: Any,
) -> Runner:
    """A runner of a checkpoint, with a pool of at least `tokens` tokens over all ranks.

    Args:
        directory: Hugging Face checkpoint.
        tp: total tensor parallelism.
        dcp_size: ranks that share the caches.
        tokens: size of the pool, rounded up to whole pages.
        page_size: rows per page and rank.
        kv_dtype: of both caches.
        dtype: of weights and activations.
        with_mtp: load the MTP layer as well.
        largest_step: see `Runner`.
        **options: other fields of `StepOptions`.
    """
    cfg = ModelConfig.from_hf(directory)
    mesh = make_mesh(tp, dcp_size)
    model = Model(cfg, mesh, jnp.dtype(dtype), with_mtp)
    params = load_hf(directory, cfg, model.param_defs, mesh)
    spec = CacheSpec.of(
        cfg,
        with_mtp=with_mtp,
        pages=pages_needed(tokens, page_size, dcp_size),
        page_size=page_size,
        dcp_size=dcp_size,
        kv_dtype=kv_dtype,
        index_replicated=options.get("index_cache") == "replicated",
    )
    opts = StepOptions(page_size=page_size, **options)
    return Runner(model, params, spec, opts, largest_step=largest_step)


@dataclass
class Sequence:
    """A sequence and where it stands.

    Attributes:
        tokens: prompt, then generated tokens; the last ones may not be in the cache yet.
        pages: its pages, in order.
        cached: tokens in the cache.
    """

    tokens: list[int]
    pages: list[int]
    cached: int = 0


def deal(
    runner: Runner, prompts: Many[Many[int]], *, room: int = 0, seed: int | None = 0
) -> list[Sequence]:
    """Sequences with pages for `room` more tokens each.

    Pages are dealt in an order that `seed` shuffles, so that nothing may count on neighbours; None
    deals them in order.
    """
    free = list(range(runner.spec.pages))
    if seed is not None:
        free = np.random.default_rng(seed).permutation(free).tolist()
    sequences = []
    for prompt in prompts:
        need = pages_needed(len(prompt) + room, runner.spec.page_size, runner.dcp_size)
        if need > len(free):
            raise ValueError(
                f"{len(prompts)} sequences need more than the pool's {runner.spec.pages} pages: "
                "open the runner with more tokens."
            )
        sequences.append(Sequence(list(prompt), free[:need]))
        free = free[need:]
    return sequences


def advance(
    runner: Runner,
    sequences: Many[Sequence],
    counts: Many[int] | None = None,
    **changes: Any,
) -> StepResult:
    """One step over the tokens of each sequence that are not cached yet.

    A sequence that has none left afterwards gets its greedy next token appended.

    Args:
        runner: where the sequences live.
        sequences: rows of the step.
        counts: take only this many tokens of each (chunked prefill).
        **changes: see `Runner.step`.
    """
    rows = []
    for i, sequence in enumerate(sequences):
        end = len(sequence.tokens) if counts is None else sequence.cached + counts[i]
        rows.append(Row(sequence.tokens[sequence.cached : end], sequence.cached, sequence.pages))
    width = max(len(sequence.pages) for sequence in sequences)
    result = runner.step(rows, table_width=width, **changes)
    for sequence, row, token in zip(sequences, rows, result.next_tokens, strict=True):
        sequence.cached += len(row.tokens)
        if sequence.cached == len(sequence.tokens):
            sequence.tokens.append(token)
    return result


def selected_sets(explanation: Explanation, layer: int, row: int, token: int) -> list[set[int]]:
    """The positions that each rank attended over for one query token; counts are checked."""
    positions = explanation.positions[layer][:, row, token]
    sets = [set(rank[rank >= 0].tolist()) for rank in positions]
    if [len(s) for s in sets] != explanation.counts[layer][:, row, token].tolist():
        raise ValueError(
            f"layer {layer}, row {row}, token {token}: counts do not fit the positions."
        )
    return sets


def cached_rows(runner: Runner, sequence: Sequence, leaf: str, layer: int) -> np.ndarray:
    """What a cache holds of a sequence's tokens, in order of position, whichever rank has each.

    Args:
        runner: where the sequence lives.
        sequence: its `cached` first tokens are read.
        leaf: field of `KVCache`.
        layer: region of that cache: the layer, or the ordinal of the indexer for index caches.
    """
    spec = runner.spec
    index = leaf.startswith("index")
    ranks = 1 if index and spec.index_replicated else spec.dcp_size
    page_size = spec.index_page_size if index else spec.page_size
    regions = spec.index_layers if index else spec.layers
    pool = np.asarray(getattr(runner.cache, leaf))
    pool = pool.reshape(ranks, regions, spec.pages, page_size, *pool.shape[1:])
    pages = pool[:, layer, sequence.pages]
    # [W, P, page_size, ...] -> positions: page, row in the page, rank.
    in_order = np.moveaxis(pages, 0, 2).reshape(-1, *pages.shape[3:])
    return in_order[: sequence.cached]
