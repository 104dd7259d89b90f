"""The programs that are timed: one layer's attention, one layer, a whole step; and index scores.

Each is traced with the caches donated, as the engine's steps are, and writes the batch's rows
before it reads them, so that running it again changes nothing.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dcp_jax.bench.options import TimedLayer
from dcp_jax.cache.pool import CacheSpec, KVCache, Leaf
from dcp_jax.dcp.collectives import axis_size
from dcp_jax.dcp.step import Batch, StepOptions, step_here
from dcp_jax.dcp.traffic import collectives, received_by_kind
from dcp_jax.layers import param as params_lib
from dcp_jax.layers.decoder import DecoderLayer
from dcp_jax.layers.indexer import Selection
from dcp_jax.layers.linear import linear
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.rope import rope_table
from dcp_jax.layers.sizes import Sizes
from dcp_jax.mesh import DCP, tp_size
from dcp_jax.model import Model, StepOutput
from pallas_kernels.indexer import index_scores


class Program(NamedTuple):
    """A compiled program, what it exchanges (bytes by kind), its peak of temporary bytes."""

    run: Any
    received_bytes: dict[str, int]
    temp_bytes: int | None


class LayerGraph:
    """One layer of a model, with or without an indexer: abstract, holds no array."""

    def __init__(self, model: Model, timed: TimedLayer):
        self.model, self.timed = model, timed
        sizes = Sizes.padded(model.cfg, tp_size(model.mesh))
        self._abstract = params_lib.abstract(
            lambda: DecoderLayer(
                model.cfg, sizes, model.dtype, full=timed.kind == "full", sparse=timed.sparse
            )
        )
        self.defs = params_lib.param_defs(self._abstract[1])

    def bind(self, params: dict) -> DecoderLayer:
        """The layer over a rank's local parameters."""
        return params_lib.bind(*self._abstract, params)


class LayerOutput(NamedTuple):
    """What a timed layer gives.

    Attributes:
        x: its output, [B, T, d].
        selection: a `Selection` with a leading axis of ranks, or None.
    """

    x: Leaf
    selection: Leaf | None


def trace_layer(
    graph: LayerGraph,
    part: str,
    params: dict,
    cache: KVCache,
    batch: Batch,
    x: Float[Array, "B T d"],
    selection: Selection | None,
    *,
    spec: CacheSpec,
    opts: StepOptions,
) -> jax.stages.Traced:
    """(params, cache, batch, x, selection) -> (LayerOutput, cache).

    Args:
        graph: the layer.
        part: "attention", whose input is normalised already, or "layer".
        params: of the layer.
        cache: both caches.
        batch: the rows; their tokens are not read.
        x: input.
        selection: of a full layer with the same path, for a shared one; else None.
        spec: sizes of the caches.
        opts: static options, the path above all.
    """
    cfg, timed = graph.model.cfg, graph.timed

    def body(params, cache, batch, x, selection):
        layer = graph.bind(params)
        step = step_here(batch, opts.page_size)
        context = {
            "layer": timed.number,
            "ordinal": timed.ordinal,
            "rope": rope_table(cfg.rope, cfg.qk_rope_head_dim, step.positions),
            "spec": spec,
            "step": step,
            "opts": opts,
        }
        mine = jax.tree.map(lambda leaf: leaf[0], selection)
        called = layer.attn if part == "attention" else layer
        y, cache, chosen, *_ = called(x, cache, mine, **context)
        return LayerOutput(y, jax.tree.map(lambda leaf: leaf[None], chosen)), cache

    out = LayerOutput(PartitionSpec(), PartitionSpec(DCP)), spec.specs()
    specs = (params_lib.specs(graph.defs), spec.specs(), *_whole(2), PartitionSpec(DCP))
    run = _over_ranks(graph.model, body, specs, out)
    return jax.jit(run, donate_argnums=1).trace(params, cache, batch, x, selection)


def trace_step(
    model: Model, params: dict, cache: KVCache, batch: Batch, *, spec: CacheSpec, opts: StepOptions
) -> jax.stages.Traced:
    """(params, cache, batch) -> (StepOutput, cache): the engine's step.

    It returns hidden states too, which are compared; each rank has them anyway.
    """

    def step(params, cache, batch) -> tuple[StepOutput, KVCache]:
        return model.forward(params, cache, batch, spec=spec, opts=opts)

    return jax.jit(step, donate_argnums=1).trace(params, cache, batch)


def compile_program(traced: jax.stages.Traced, model: Model) -> Program:
    """Compile, and read what is exchanged from the trace and the memory from the executable."""
    traffic = list(collectives(traced.jaxpr, dict(model.mesh.shape)))
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    temp = None if memory is None else int(memory.temp_size_in_bytes)
    return Program(compiled, received_by_kind(traffic), temp)


def sampled_scores(
    graph: LayerGraph,
    params: dict,
    cache: KVCache,
    batch: Batch,
    x: Float[Array, "B T d"],
    tokens: Int[Array, " t"],
    *,
    spec: CacheSpec,
    opts: StepOptions,
) -> Float[Array, "B t S"]:
    """Index scores of some query tokens over every key of their rows, in order of position.

    Args:
        graph: a full layer.
        params: of the layer.
        cache: caches that hold the batch's own rows already.
        batch: the rows.
        x: input of the attention part.
        tokens: which query tokens of every row.
        spec: sizes of the caches.
        opts: static options.
    """
    cfg, timed = graph.model.cfg, graph.timed

    def body(params, cache, batch, x, tokens):
        attention = graph.bind(params).attn
        step = step_here(batch, opts.page_size)
        rope = rope_table(cfg.rope, cfg.qk_rope_head_dim, step.positions)
        latent = linear(x, attention.q_a_proj[...])
        latent = rms_norm(latent, attention.q_a_layernorm[...], cfg.latent_norm_eps)
        queries = attention.indexer.queries(latent, x, rope, spec.fp8, spec.fp8)
        visible = step.visible if spec.index_replicated else step.local_visible
        scores = index_scores(
            queries.q[:, tokens],
            queries.weights[:, tokens],
            cache.index_k,
            cache.index_scale,
            batch.page_table,
            visible[:, tokens],
            page_size=spec.index_page_size,
            base_row=timed.ordinal * spec.index_rows,
            implementation=opts.kernels,
        )
        if spec.index_replicated or axis_size(DCP) == 1:
            return scores
        # Local index j of rank r is position j * W + r.
        every = jax.lax.all_gather(scores, DCP, axis=3)
        return every.reshape(*scores.shape[:2], -1)

    specs = (params_lib.specs(graph.defs), spec.specs(), *_whole(3))
    run = _over_ranks(graph.model, body, specs, PartitionSpec())
    return jax.jit(run)(params, cache, batch, x, tokens)


def _whole(count: int) -> tuple[PartitionSpec, ...]:
    return (PartitionSpec(),) * count


def _over_ranks(model: Model, body: Any, in_specs: Any, out_specs: Any) -> Any:
    """`body` on every rank, with the precision that the model computes in."""

    def precise(*args):
        exact = model.dtype == jnp.float32
        with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
            return body(*args)

    return jax.shard_map(
        precise, mesh=model.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
