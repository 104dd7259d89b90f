"""The whole model as one pure function: parameters, caches and a batch in, tokens and caches out.

One `shard_map` surrounds all of it; every collective inside is written out in `dcp/collectives.py`.
"""

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from dcp_jax.cache.pool import CacheSpec, KVCache, Leaf
from dcp_jax.config import ModelConfig
from dcp_jax.dcp import layout
from dcp_jax.dcp.step import Batch, DcpStep, StepOptions, step_here
from dcp_jax.layers import param as params_lib
from dcp_jax.layers.decoder import DecoderLayer
from dcp_jax.layers.indexer import Selection
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.param import param
from dcp_jax.layers.quantized import hold_in_blocks
from dcp_jax.layers.rope import rope_table
from dcp_jax.layers.sizes import Sizes
from dcp_jax.layers.vocab import argmax_token, embed, local_logits
from dcp_jax.mesh import DCP, TP, tp_size
from dcp_jax.mtp import NextN
from dcp_jax.quantization import Blocks, activation_scales
from dcp_jax.weights.mapping import quantized_params


class Transformer(nnx.Module):
    """Parameters of the model; layers are keyed by their number."""

    def __init__(self, cfg: ModelConfig, sizes: Sizes, dtype: jnp.dtype, with_mtp: bool):
        """`sizes` are global and padded."""
        self.embed = param((sizes.vocab, cfg.hidden_size), dtype, ("vocab",))
        self.norm = param((cfg.hidden_size,), dtype)
        self.lm_head = param((sizes.vocab, cfg.hidden_size), dtype, ("vocab",))
        self.layers = nnx.Dict(
            {
                str(i): DecoderLayer(
                    cfg, sizes, dtype, full=cfg.is_full(i), sparse=cfg.is_sparse(i)
                )
                for i in range(cfg.num_hidden_layers)
            }
        )
        if with_mtp:
            self.mtp = NextN(cfg, sizes, dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Explanation:
    """What a step selected; arrays per full (MTP included) or sparse layer, by layer number.

    Attributes:
        positions: int32 [W, B, T, K], the positions that each rank attended over, in no order
            (K is the width of its page table where nothing was selected).
        counts: int32 [W, B, T], how many of them are real.
        experts: int32 [B, T, k].
    """

    positions: dict[int, Leaf] | Leaf
    counts: dict[int, Leaf] | Leaf
    experts: dict[int, Leaf] | Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Result of a step.

    Attributes:
        next_tokens: int32 [B], argmax after each row's last token.
        certified: bool [B]; a False row must be run again with `candidates="full"`.
        logits: float32 [B, 1 or T, V'], vocabulary-sharded; padding tokens are -inf.
        hidden: [B, T, d] after the final norm.
        explanation: selections and experts.
    """

    next_tokens: Leaf
    certified: Leaf
    logits: Leaf | None = None
    hidden: Leaf | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True, eq=False)
class Model:
    """A model on a mesh: static, hashed by identity; holds no array.

    Attributes:
        cfg: the model's configuration.
        mesh: axes (`dp`, `model`, `dcp`).
        dtype: of activations and weights; float32 computes with highest matmul precision.
        with_mtp: also hold the NextN layer's parameters.
        activation_scheme: "dynamic" quantises what meets an e4m3 weight, as the release prescribes.

    With a quantised config, the weights that its checkpoint has in blocks are held in blocks; but a
    float32 model holds every weight in float32, dequantised: the reference of all others.
    """

    cfg: ModelConfig
    mesh: Mesh
    dtype: jnp.dtype
    with_mtp: bool = False
    activation_scheme: Literal["none", "dynamic"] = "none"

    @cached_property
    def blocks(self) -> dict[str, Blocks]:
        """Path -> blocks of the parameters that are held in blocks."""
        if self.dtype == jnp.float32:
            return {}
        return quantized_params(self.cfg, with_mtp=self.with_mtp)

    @cached_property
    def _abstract(self) -> tuple[Any, nnx.State]:
        sizes = Sizes.padded(self.cfg, tp_size(self.mesh))
        dynamic = self.activation_scheme == "dynamic"
        scales = activation_scales(self.cfg.quantization or {}) if dynamic else None

        def build() -> Transformer:
            module = Transformer(self.cfg, sizes, self.dtype, self.with_mtp)
            for path, blocks in self.blocks.items():
                hold_in_blocks(module, path, blocks, scales)
            return module

        return params_lib.abstract(build)

    @cached_property
    def param_defs(self) -> dict:
        """Nested dict of `ParamDef`: what `weights` must load."""
        return params_lib.param_defs(self._abstract[1])

    def forward(
        self, params: dict, cache: KVCache, batch: Batch, *, spec: CacheSpec, opts: StepOptions
    ) -> tuple[StepOutput, KVCache]:
        """One step of B rows: writes their new tokens, returns what follows the last of each.

        Args:
            params: nested dict of arrays, sharded as `param_defs` says.
            cache: both caches, as `init_cache(spec, mesh)` made them; donate it.
            batch: the rows.
            spec: sizes of the caches.
            opts: static options.
        """
        return self._run(self._forward_local, params, cache, (batch,), spec, opts)

    def forward_mtp(
        self,
        params: dict,
        cache: KVCache,
        batch: Batch,
        hidden: Float[Array, "B T d"],
        *,
        spec: CacheSpec,
        opts: StepOptions,
    ) -> tuple[StepOutput, KVCache]:
        """One step of the NextN layer: `batch.tokens` hold t[i+1] at position i, `hidden` h[i].

        `hidden` is the main model's final-norm output, or this function's for chained drafts.
        """
        return self._run(self._mtp_local, params, cache, (batch, hidden), spec, opts)

    def _run(self, local, params, cache, inputs, spec, opts):
        out_specs = StepOutput(
            next_tokens=PartitionSpec(),
            certified=PartitionSpec(),
            logits=None if opts.logits == "none" else PartitionSpec(None, None, TP),
            hidden=PartitionSpec() if opts.return_hidden else None,
            explanation=Explanation(PartitionSpec(DCP), PartitionSpec(DCP), PartitionSpec())
            if opts.explain
            else None,
        )

        def body(params, cache, *inputs):
            module = params_lib.bind(*self._abstract, params)
            exact = self.dtype == jnp.float32
            precision = (
                jax.default_matmul_precision("highest") if exact else contextlib.nullcontext()
            )
            with precision:
                return local(module, cache, *inputs, spec=spec, opts=opts)

        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(
                params_lib.specs(self.param_defs),
                spec.specs(),
                *(PartitionSpec() for _ in inputs),
            ),
            out_specs=(out_specs, spec.specs()),
            check_vma=False,
        )(params, cache, *inputs)

    def _forward_local(self, module, cache, batch, *, spec, opts):
        """1. localise the batch  2. embed  3. layers  4. final norm  5. head."""
        cfg = self.cfg
        step = step_here(batch, opts.page_size)
        rope = rope_table(cfg.rope, cfg.qk_rope_head_dim, step.positions)
        x = embed(batch.tokens, module.embed[...])
        record = _Record(step)
        selection = None
        for i in range(cfg.num_hidden_layers):
            with jax.named_scope(f"layer{i}"):
                x, cache, selection, experts = module.layers[str(i)](
                    x,
                    cache,
                    selection,
                    layer=i,
                    ordinal=cfg.index_ordinal(i),
                    rope=rope,
                    spec=spec,
                    step=step,
                    opts=opts,
                )
            record.add(i, experts)
            if cfg.is_full(i):
                record.selections[i] = selection
        hidden = rms_norm(x, module.norm[...], cfg.rms_norm_eps)
        return self._output(module, hidden, batch, record, opts), cache

    def _mtp_local(self, module, cache, batch, hidden, *, spec, opts):
        """1. localise the batch  2. embed  3. the layer, with its norms  4. head."""
        cfg = self.cfg
        step = step_here(batch, opts.page_size)
        rope = rope_table(cfg.rope, cfg.qk_rope_head_dim, step.positions)
        record = _Record(step)
        result = module.mtp(
            embed(batch.tokens, module.embed[...]),
            hidden,
            cache,
            layer=cfg.num_hidden_layers,
            ordinal=len(cfg.full_layers),
            rope=rope,
            spec=spec,
            step=step,
            opts=opts,
        )
        record.add(cfg.num_hidden_layers, result.experts)
        record.selections[cfg.num_hidden_layers] = result.selection
        return self._output(module, result.x, batch, record, opts), result.cache

    def _output(self, module, hidden, batch, record, opts) -> StepOutput:
        last = jnp.maximum(batch.lengths - 1, 0)[:, None, None]
        final = jnp.take_along_axis(hidden, last, axis=1)
        head, vocab = module.lm_head[...], self.cfg.vocab_size
        if opts.logits == "all":
            logits = local_logits(hidden, head, vocab)
            final_logits = jnp.take_along_axis(logits, last, axis=1)
        else:
            logits = final_logits = local_logits(final, head, vocab)
        return StepOutput(
            next_tokens=argmax_token(final_logits[:, 0]),
            certified=record.certified(),
            logits=None if opts.logits == "none" else logits,
            hidden=hidden if opts.return_hidden else None,
            explanation=record.explanation(opts) if opts.explain else None,
        )


class _Record:
    """Collects each layer's selection and experts while the step is traced.

    A full layer of `MHA_ONE_SHOT` selects nothing: it attends to every visible key.
    """

    def __init__(self, step: DcpStep):
        self.step = step
        self.selections: dict[int, Selection | None] = {}
        self.experts: dict[int, Array] = {}

    def add(self, layer: int, experts: Array | None) -> None:
        if experts is not None:
            self.experts[layer] = experts

    def certified(self) -> Bool[Array, " B"]:
        """A row holds if every valid token of it does in every full layer."""
        holds = jnp.ones_like(self.step.valid)
        for selection in self.selections.values():
            if selection is not None:
                holds &= selection.certified
        return jnp.all(holds | ~self.step.valid, axis=1)

    def explanation(self, opts: StepOptions) -> Explanation:
        """This rank's share of every selection, as positions."""
        ranks = jax.lax.axis_size(DCP)
        positions, counts = {}, {}
        for layer, selection in self.selections.items():
            if selection is None:
                keys = self.step.page_table.shape[1] * opts.page_size
                index, owned = jnp.arange(keys, dtype=jnp.int32), self.step.local_visible
            else:
                index, owned = selection.index, selection.counts
            real = jnp.arange(index.shape[-1]) < owned[..., None]
            if opts.path.gathers and ranks > 1:
                place = index
                real &= layout.owner(place, ranks) == self.step.rank
            else:
                place = layout.position_of(index, self.step.rank, ranks)
            positions[layer] = jnp.where(real, place, -1)[None]
            counts[layer] = jnp.sum(real, axis=-1, dtype=jnp.int32)[None]
        return Explanation(positions, counts, self.experts)
