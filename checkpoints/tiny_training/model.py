"""The training forward: whole sequences, no cache, on the parameters and maths of `dcp_jax`.

It is the function that the engine computes from the exported checkpoint (a test compares the
logits), for one device, with what training needs beside the logits: at some query rows, the
indexer's distribution and the attention that it is to predict.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dcp_jax.config import ModelConfig
from dcp_jax.layers import param as params_lib
from dcp_jax.layers.decoder import DecoderLayer
from dcp_jax.layers.indexer import Indexer
from dcp_jax.layers.mla import Attention
from dcp_jax.layers.moe import MoE, route
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.rope import apply_rope, rope_table
from dcp_jax.layers.sizes import Sizes
from dcp_jax.model import Transformer
from pallas_kernels import kv_layout
from tiny_training.attention import Implementation, attend, row_probabilities
from tiny_training.selection import index_scores, selection_mask


@dataclass(frozen=True)
class ForwardOptions:
    """Static switches.

    Attributes:
        sparse: attend over the indexer's selection, as deployed; else over all keys.
        fp8: round latents and index rows as the fp8 caches do.
        drafts: passes of the MTP layer, each fed with the output of the one before.
        attention: implementation of the main attention.
        random: select at random instead (a control).
    """

    sparse: bool = False
    fp8: bool = False
    drafts: int = 1
    attention: Implementation = "xla"
    random: bool = False


class Tap(NamedTuple):
    """What one indexer says at the sampled rows, and the attention that uses its selection.

    Attributes:
        scores: float32 [B, R, T], -inf where not visible; carries the indexer's derivative.
        target: float32 [B, R, T], attention probabilities, the mean over heads and over the layers
            that share the selection; a constant.
    """

    scores: Float[Array, "B R T"]
    target: Float[Array, "B R T"]


class ForwardResult(NamedTuple):
    """Results; layers by number, the MTP layer's being `num_hidden_layers`.

    Attributes:
        logits: float32 [B, T, V].
        draft_logits: per MTP pass d = 1, 2, ..: what follows the token at position i + d.
        taps: per full layer.
        attention: per layer, dense attention probabilities at the sampled rows [B, R, T].
        loads: per sparse layer, the share of tokens that chose each expert [E].
    """

    logits: Float[Array, "B T V"]
    draft_logits: tuple[Float[Array, "B T V"], ...]
    taps: dict[int, Tap]
    attention: dict[int, Float[Array, "B R T"]]
    loads: dict[int, Float[Array, " E"]]


@cache
def abstract(cfg: ModelConfig, dtype: str) -> tuple[Any, nnx.State]:
    """Graph and abstract state of the whole model, unpadded."""
    sizes = Sizes.real(cfg)
    return params_lib.abstract(lambda: Transformer(cfg, sizes, jnp.dtype(dtype), with_mtp=True))


def init_params(cfg: ModelConfig, seed: int) -> dict:
    """float32 parameters: matrices scaled by fan-in, those into the residual stream smaller."""
    depth = (2 * cfg.num_hidden_layers) ** -0.5
    gains = {"o_proj": depth, "down_proj": depth, "lm_head": 0.5}
    gains["experts_down"] = depth / cfg.routed_scaling_factor
    rng = np.random.default_rng(seed)

    def make(path, definition):
        name, shape = path[-1].key, definition.shape
        if "norm" in name and not name.endswith("bias"):
            return jnp.ones(shape, jnp.float32)
        if name.endswith("bias"):
            return jnp.zeros(shape, jnp.float32)
        fan_in = shape[-1] * (shape[-2] if name == "o_proj" else 1)
        scale = 0.3 if name == "embed" else gains.get(name, 1.0) * fan_in**-0.5
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32))

    definitions = params_lib.param_defs(abstract(cfg, "float32")[1])
    return jax.tree_util.tree_map_with_path(
        make, definitions, is_leaf=lambda d: isinstance(d, params_lib.ParamDef)
    )


def as_stored(params: dict, dtype: jnp.dtype) -> dict:
    """The parameters as a checkpoint of this dtype stores them: what the forward computes with.

    The indexer's key norm and the router's correction bias stay float32; the router's weights are
    rounded, and computed with in float32.
    """

    def store(path, value):
        name = path[-1].key
        if name.startswith("k_norm") or name == "e_score_correction_bias":
            return value
        rounded = value.astype(dtype)
        return rounded.astype(jnp.float32) if name == "gate" else rounded

    return jax.tree_util.tree_map_with_path(store, params)


def forward(
    params: dict,
    cfg: ModelConfig,
    tokens: Int[Array, "B N"],
    rows: Int[Array, "B R"],
    opts: ForwardOptions,
    dtype: jnp.dtype,
    seed: Array | None = None,
) -> ForwardResult:
    """The model over whole sequences.

    Args:
        params: float32 parameters (`init_params`).
        cfg: the model.
        tokens: the T tokens to read, and `opts.drafts` more that the MTP passes are fed with.
        rows: query rows at which indexers are observed.
        opts: static switches.
        dtype: of weights and activations.
        seed: of the random selection, if that is asked for.
    """
    module = params_lib.bind(*abstract(cfg, str(jnp.dtype(dtype))), as_stored(params, dtype))
    length = tokens.shape[1] - opts.drafts
    run = _Run(cfg, opts, rows, seed, tokens.shape[0], length)
    embedded = module.embed[...][tokens]
    x = embedded[:, :length]
    for i in range(cfg.num_hidden_layers):
        x = run.layer(i, module.layers[str(i)], x)
    hidden = rms_norm(x, module.norm[...], cfg.rms_norm_eps)

    head = module.lm_head[...]
    draft_logits, state = [], hidden
    for draft in range(1, opts.drafts + 1):
        state = run.next_n(module.mtp, embedded[:, draft : draft + length], state, first=draft == 1)
        draft_logits.append(_product("btd,vd->btv", state, head).astype(jnp.float32))
    logits = _product("btd,vd->btv", hidden, head).astype(jnp.float32)
    taps = {i: Tap(scores, sum(p) / len(p)) for i, (scores, p) in run.groups.items()}
    return ForwardResult(logits, tuple(draft_logits), taps, run.attention, run.loads)


class _Run:
    """Layers of one forward, and what they leave behind for the result."""

    def __init__(self, cfg, opts, rows, seed, batch, length):
        self.cfg, self.opts, self.rows, self.seed = cfg, opts, rows, seed
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        self.rope = rope_table(cfg.rope, cfg.qk_rope_head_dim, positions)
        self.rope_of_rows = tuple(_take_rows(t, rows) for t in self.rope)
        self.mask: Bool[Array, "B T T"] | None = None
        self.groups: dict[int, tuple[Array, list[Array]]] = {}
        self.attention: dict[int, Array] = {}
        self.loads: dict[int, Array] = {}
        self._observe = True

    def layer(self, number: int, layer: DecoderLayer, x: Array) -> Array:
        """One decoder layer, as `DecoderLayer` computes it."""
        eps = self.cfg.rms_norm_eps
        with jax.named_scope(f"layer{number}"):
            normed = rms_norm(x, layer.input_layernorm[...], eps)
            x = x + self._attention(number, layer.attn, normed)
            normed = rms_norm(x, layer.post_attention_layernorm[...], eps)
            if isinstance(layer.mlp, MoE):
                y, self.loads[number] = _experts(layer.mlp, normed, self.cfg)
            else:
                y = _swiglu(normed, layer.mlp.gate_up_proj[...], layer.mlp.down_proj[...])
        return x + y

    def next_n(self, mtp, embedded: Array, hidden: Array, *, first: bool) -> Array:
        """One pass of the MTP layer, as `NextN` computes it; only the first is observed."""
        self._observe = first
        halves = (
            rms_norm(embedded, mtp.enorm[...], mtp.eps),
            rms_norm(hidden, mtp.hnorm[...], mtp.eps),
        )
        z = _product("...d,od->...o", jnp.concatenate(halves, axis=-1), mtp.eh_proj[...])
        x = self.layer(self.cfg.num_hidden_layers, mtp.layer, z)
        return rms_norm(x, mtp.norm[...], mtp.eps)

    def _attention(self, number: int, attn: Attention, x: Array) -> Array:
        cfg, nope = self.cfg, self.cfg.qk_nope_head_dim
        q_latent = rms_norm(
            _product("...d,od->...o", x, attn.q_a_proj[...]),
            attn.q_a_layernorm[...],
            cfg.latent_norm_eps,
        )
        kv = _product("...d,od->...o", x, attn.kv_a_proj[...])
        kv_c = rms_norm(kv[..., : cfg.kv_lora_rank], attn.kv_a_layernorm[...], cfg.latent_norm_eps)
        if self.opts.fp8:
            kv_c = _straight_through(kv_c, _round_latent)
        k_pe = apply_rope(kv[..., cfg.kv_lora_rank :], self.rope, interleaved=True)
        q = _product("btq,hnq->bthn", q_latent, attn.q_b_proj[...])
        q_pe = apply_rope(q[..., nope:], self.rope, interleaved=True)
        q = jnp.concatenate([q[..., :nope], q_pe], axis=-1)
        k_nope = _product("btc,hnc->bthn", kv_c, attn.w_uk[...])
        k_pe = jnp.broadcast_to(k_pe[:, :, None], (*k_nope.shape[:3], k_pe.shape[-1]))
        k = jnp.concatenate([k_nope, k_pe], axis=-1)
        v = _product("btc,hvc->bthv", kv_c, attn.w_uv[...])

        probabilities = None
        if self._observe:
            q_rows = _take_rows(q, self.rows)
            probabilities = row_probabilities(q_rows, k, self.rows, cfg.softmax_scale)
            self.attention[number] = probabilities
        if hasattr(attn, "indexer"):
            self._index(number, attn.indexer, *jax.lax.stop_gradient((x, q_latent)))
        if probabilities is not None:
            self.groups[max(self.groups)][1].append(probabilities)
        attended = attend(
            *(q, k, v, self.mask),
            scale=cfg.softmax_scale,
            implementation=self.opts.attention,
        )
        return _product("bthv,dhv->btd", attended, attn.o_proj[...])

    def _index(self, number: int, indexer: Indexer, x: Array, q_latent: Array) -> None:
        """Scores of the sampled rows, and in sparse mode the selection of all rows."""
        rotate = self.opts.fp8
        keys, _ = indexer.keys(x, self.rope, False, rotate)
        if self.opts.fp8:
            keys = _straight_through(keys, _round_index)
        if self._observe:
            at_rows = (_take_rows(a, self.rows) for a in (q_latent, x))
            q, weights = indexer.queries(*at_rows, self.rope_of_rows, False, rotate)
            if self.opts.fp8:
                q = _straight_through(q, _round_index)
            visible = jnp.arange(keys.shape[1]) <= self.rows[..., None]
            scores = jnp.where(visible, index_scores(q, weights, keys), -jnp.inf)
            self.groups[number] = scores, []
        if self.opts.sparse and keys.shape[1] > self.cfg.index_topk:
            q, weights = indexer.queries(q_latent, x, self.rope, False, rotate)
            if self.opts.fp8:
                q = _round_index(q)
            seed = jax.random.fold_in(self.seed, number) if self.opts.random else None
            self.mask = selection_mask(q, weights, keys, self.cfg.index_topk, seed)


def _product(spec: str, x: Array, w: Array) -> Array:
    """`einsum` of `dcp_jax`, with derivatives in x's dtype too (theirs are float32 products)."""
    return jnp.einsum(spec, x, w)


def _swiglu(x: Array, gate_up: Array, down: Array) -> Array:
    gate, up = (_product("...d,id->...i", x, gate_up[i]) for i in range(2))
    return _product("...i,di->...d", jax.nn.silu(gate) * up, down)


def _experts(mlp: MoE, x: Array, cfg: ModelConfig) -> tuple[Array, Float[Array, " E"]]:
    """Every expert on every token, weighted by the router: at this size faster than sorting."""
    flat = x.reshape(-1, x.shape[-1])
    chosen, weights = route(flat, mlp.gate[...], mlp.e_score_correction_bias[...], cfg)
    one_hot = jax.nn.one_hot(chosen, cfg.n_routed_experts)
    share = jnp.einsum("nke,nk->ne", one_hot, weights).astype(x.dtype)
    gate_up, down = mlp.experts_gate_up[...], mlp.experts_down[...]
    gate, up = (_product("nd,eid->nei", flat, gate_up[:, i]) for i in range(2))
    routed = _product("nei,edi->nd", jax.nn.silu(gate) * up * share[..., None], down)
    shared = _swiglu(x, mlp.shared.gate_up_proj[...], mlp.shared.down_proj[...])
    return routed.reshape(x.shape) + shared, jnp.mean(one_hot.sum(1), axis=0)


def _take_rows(x: Array, rows: Int[Array, "B R"]) -> Array:
    """x [B, T, ...] at `rows`."""
    return jax.vmap(lambda one, at: one[at])(x, rows)


def _straight_through(x: Array, rounding) -> Array:
    """`rounding(x)` with the derivative of x."""
    return x + jax.lax.stop_gradient(rounding(x) - x)


def _round_latent(x: Array) -> Array:
    return kv_layout.dequantize(*kv_layout.quantize_latent(x), x.dtype)


def _round_index(x: Array) -> Array:
    values, scale = kv_layout.quantize_index(x)
    return (kv_layout.e4m3_from_bytes(values).astype(jnp.float32) * scale[..., None]).astype(
        x.dtype
    )
