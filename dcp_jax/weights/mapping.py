"""Which Hugging Face tensors make up each parameter, as a table.

A parameter is a stack of pieces (none, {gate, up}, or experts x {gate, up}); a piece is one tensor,
reshaped, and cut to a window of one axis. `Source` is one table row with the numbers of a config
put in, and says which part of which tensor any box of the parameter is.

Invariant: shapes here are the checkpoint's own ("logical"); padding is the loader's business.
"""

import itertools
import math
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_jax.config import ModelConfig
from dcp_jax.quantization import Blocks, block_format, kept_modules

Cuts = tuple[slice, ...]


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        param: path of the parameter within its layer (or at the root).
        tensor: tensor name within its layer; `{expert}` and `{gate_up}` are stacked, in the order
            of their appearance, as leading axes of the parameter.
        dims: sizes of the tensor's axes, symbols of `dimensions`; parentheses hold axes that the
            tensor has merged into one and the parameter has apart.
        window: (axis, start, stop), in symbols, of the part that this parameter takes.
        when: the kind of layer that has the parameter ("full", "dense", "sparse"), or always.
        quantized: a quantised checkpoint has it in blocks: the projections, unlike embedding, head,
            router, norms, index weights and what joins the MTP layer's halves.
    """

    param: str
    tensor: str
    dims: str
    window: tuple[str, str, str] | None = None
    when: str = "always"
    quantized: bool = False


GATE_UP = ("gate", "up")

ROOT_RULES = (
    Rule("embed", "model.embed_tokens.weight", "V d"),
    Rule("norm", "model.norm.weight", "d"),
    Rule("lm_head", "lm_head.weight", "V d"),
)

LAYER_RULES = (
    Rule("input_layernorm", "input_layernorm.weight", "d"),
    Rule("post_attention_layernorm", "post_attention_layernorm.weight", "d"),
    Rule("attn/q_a_proj", "self_attn.q_a_proj.weight", "Q d", quantized=True),
    Rule("attn/q_a_layernorm", "self_attn.q_a_layernorm.weight", "Q"),
    Rule("attn/q_b_proj", "self_attn.q_b_proj.weight", "(H NR) Q", quantized=True),
    Rule("attn/kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", "CR d", quantized=True),
    Rule("attn/kv_a_layernorm", "self_attn.kv_a_layernorm.weight", "C"),
    Rule(
        "attn/w_uk",
        "self_attn.kv_b_proj.weight",
        "(H NV) C",
        window=("NV", "0", "N"),
        quantized=True,
    ),
    Rule(
        "attn/w_uv",
        "self_attn.kv_b_proj.weight",
        "(H NV) C",
        window=("NV", "N", "NV"),
        quantized=True,
    ),
    Rule("attn/o_proj", "self_attn.o_proj.weight", "d (H v)", quantized=True),
    Rule(
        "attn/indexer/wq_b",
        "self_attn.indexer.wq_b.weight",
        "(Hi D) Q",
        when="full",
        quantized=True,
    ),
    Rule("attn/indexer/wk", "self_attn.indexer.wk.weight", "D d", when="full", quantized=True),
    Rule("attn/indexer/weights_proj", "self_attn.indexer.weights_proj.weight", "Hi d", when="full"),
    Rule("attn/indexer/k_norm_weight", "self_attn.indexer.k_norm.weight", "D", when="full"),
    Rule("attn/indexer/k_norm_bias", "self_attn.indexer.k_norm.bias", "D", when="full"),
    Rule("mlp/gate_up_proj", "mlp.{gate_up}_proj.weight", "I d", when="dense", quantized=True),
    Rule("mlp/down_proj", "mlp.down_proj.weight", "d I", when="dense", quantized=True),
    Rule("mlp/gate", "mlp.gate.weight", "E d", when="sparse"),
    Rule("mlp/e_score_correction_bias", "mlp.gate.e_score_correction_bias", "E", when="sparse"),
    Rule(
        "mlp/experts_gate_up",
        "mlp.experts.{expert}.{gate_up}_proj.weight",
        "Im d",
        when="sparse",
        quantized=True,
    ),
    Rule(
        "mlp/experts_down",
        "mlp.experts.{expert}.down_proj.weight",
        "d Im",
        when="sparse",
        quantized=True,
    ),
    Rule(
        "mlp/shared/gate_up_proj",
        "mlp.shared_experts.{gate_up}_proj.weight",
        "Is d",
        when="sparse",
        quantized=True,
    ),
    Rule(
        "mlp/shared/down_proj",
        "mlp.shared_experts.down_proj.weight",
        "d Is",
        when="sparse",
        quantized=True,
    ),
)

# The form that Hugging Face holds in memory, taken instead when the checkpoint has it.
FUSED_RULES = (
    Rule("mlp/experts_gate_up", "mlp.experts.gate_up_proj", "E (2 Im) d", when="sparse"),
    Rule("mlp/experts_down", "mlp.experts.down_proj", "E d Im", when="sparse"),
)

# A model whose head is the embedding (`tie_word_embeddings`) has no use for a stored head.
TIED_HEAD = Rule("lm_head", "model.embed_tokens.weight", "V d")

MTP_RULES = (
    Rule("enorm", "enorm.weight", "d"),
    Rule("hnorm", "hnorm.weight", "d"),
    Rule("eh_proj", "eh_proj.weight", "d 2d"),
    Rule("norm", "shared_head.norm.weight", "d"),
)

# Where a layer's parameters and tensors are: (parameter prefix, tensor prefix).
LAYER_PREFIX = ("layers/{layer}/", "model.layers.{layer}.")
MTP_LAYER_PREFIX = ("mtp/layer/", LAYER_PREFIX[1])
MTP_PREFIX = ("mtp/", LAYER_PREFIX[1])

# Copies of the main model's embedding and head that DeepSeek stores with the MTP layer.
MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def dimensions(cfg: ModelConfig) -> dict[str, int]:
    """The number behind every symbol of the table."""
    nope, rope, value = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    return {
        "0": 0,
        "2": 2,
        "V": cfg.vocab_size,
        "d": cfg.hidden_size,
        "2d": 2 * cfg.hidden_size,
        "Q": cfg.q_lora_rank,
        "C": cfg.kv_lora_rank,
        "CR": cfg.kv_lora_rank + rope,
        "H": cfg.num_attention_heads,
        "N": nope,
        "NR": nope + rope,
        "NV": nope + value,
        "v": value,
        "Hi": cfg.index_n_heads,
        "D": cfg.index_head_dim,
        "I": cfg.intermediate_size,
        "E": cfg.n_routed_experts,
        "Im": cfg.moe_intermediate_size,
        "Is": cfg.n_shared_experts * cfg.moe_intermediate_size,
    }


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from, in a given config.

    Attributes:
        names: tensor names, in row-major order over the stacked axes.
        stack_shape: sizes of the stacked axes (empty: one tensor).
        tensor_shape: shape of each tensor in the checkpoint.
        view_shape: the same elements with merged axes apart.
        start: where the parameter's window begins, for each axis of the view.
        piece_shape: size of the window.
        merged: for each axis of the tensor, how many axes of the view it is.
        quantized: whether a quantised checkpoint has these tensors in blocks.
    """

    names: tuple[str, ...]
    stack_shape: tuple[int, ...]
    tensor_shape: tuple[int, ...]
    view_shape: tuple[int, ...]
    start: tuple[int, ...]
    piece_shape: tuple[int, ...]
    merged: tuple[int, ...]
    quantized: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter without padding."""
        return self.stack_shape + self.piece_shape

    def pieces(self, box: Sequence[slice]) -> Iterator[tuple[tuple[int, ...], str, Cuts]]:
        """The tensors behind `parameter[box]`.

        Args:
            box: one slice with start and stop per axis, inside `shape`.

        Yields:
            Where in the box a tensor's part stands, the tensor's name, and its part: slices over
            the axes of `view_shape`.
        """
        stacked = len(self.stack_shape)
        cuts = tuple(
            slice(cut.start + first, cut.stop + first)
            for cut, first in zip(box[stacked:], self.start, strict=True)
        )
        for place in np.ndindex(*(cut.stop - cut.start for cut in box[:stacked])):
            at = [cut.start + i for cut, i in zip(box[:stacked], place, strict=True)]
            name = self.names[int(np.ravel_multi_index(at, self.stack_shape)) if stacked else 0]
            yield place, name, cuts

    def blocks(self, block: tuple[int, int]) -> tuple[int, ...]:
        """How many values of each axis of the parameter share a scale.

        `block` is that of the tensor. Where the tensor has merged axes, its blocks straddle the
        borders of the inner one (heads of 192 rows in blocks of 128): the largest piece that
        straddles none, there and at the window's start, is the parameter's block.
        """
        found, axis = [1] * len(self.stack_shape), -1
        for size, merged in zip(block, self.merged, strict=True):
            axis += merged
            inner = math.gcd(size, self.start[axis])
            if merged > 1:
                inner = math.gcd(inner, self.view_shape[axis])
            found += [*[1] * (merged - 1), inner]
        return tuple(found)

    def packed(self, values_per_byte: int) -> "Source":
        """The same, of bytes that hold several values of the last axis each."""

        def last(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (*sizes[:-1], sizes[-1] // values_per_byte)

        return replace(
            self,
            tensor_shape=last(self.tensor_shape),
            view_shape=last(self.view_shape),
            start=last(self.start),
            piece_shape=last(self.piece_shape),
        )


def resolve(rule: Rule, dims: dict[str, int], tensor_prefix: str = "") -> Source:
    """The row `rule` with the sizes of a config, for the layer whose tensors have this prefix."""
    choices = {"expert": tuple(map(str, range(dims["E"]))), "gate_up": GATE_UP}
    stacked = re.findall(r"{(\w+)}", rule.tensor)
    names = tuple(
        tensor_prefix + rule.tensor.format(**dict(zip(stacked, combination, strict=True)))
        for combination in itertools.product(*(choices[key] for key in stacked))
    )
    tensor_shape: list[int] = []
    symbols: list[str] = []
    merged: list[int] = []
    for axis in re.findall(r"\(.*?\)|\S+", rule.dims):
        parts = axis.strip("()").split()
        symbols += parts
        merged.append(len(parts))
        tensor_shape.append(math.prod(dims[part] for part in parts))
    view_shape = tuple(dims[symbol] for symbol in symbols)
    start, stop = [0] * len(symbols), list(view_shape)
    if rule.window is not None:
        axis, first, last = rule.window
        start[symbols.index(axis)] = dims[first]
        stop[symbols.index(axis)] = dims[last]
    return Source(
        names=names,
        stack_shape=tuple(len(choices[key]) for key in stacked),
        tensor_shape=tuple(tensor_shape),
        view_shape=view_shape,
        start=tuple(start),
        piece_shape=tuple(b - a for a, b in zip(start, stop, strict=True)),
        merged=tuple(merged),
        quantized=rule.quantized,
    )


def sources(
    cfg: ModelConfig, *, with_mtp: bool, available: Container[str] = ()
) -> dict[str, Source]:
    """Parameter path -> source, for every parameter of the model.

    Args:
        cfg: the model.
        with_mtp: whether the MTP layer's parameters belong to it.
        available: tensor names of the checkpoint: where it has an expert stack in its fused form,
            that form is the source.
    """
    dims = dimensions(cfg)
    found: dict[str, Source] = {}

    def add(prefixes: tuple[str, str], layer: int | None, rules, kinds: set[str]) -> None:
        param_prefix, tensor_prefix = (prefix.format(layer=layer) for prefix in prefixes)
        for rule in rules:
            if rule.when in kinds:
                found[param_prefix + rule.param] = resolve(rule, dims, tensor_prefix)
        for rule in FUSED_RULES:
            if param_prefix + rule.param in found and tensor_prefix + rule.tensor in available:
                found[param_prefix + rule.param] = resolve(rule, dims, tensor_prefix)

    add(("", ""), None, ROOT_RULES, {"always"})
    if cfg.tie_word_embeddings:
        found[TIED_HEAD.param] = resolve(TIED_HEAD, dims)
    for layer in range(cfg.num_hidden_layers):
        add(LAYER_PREFIX, layer, LAYER_RULES, _kinds(cfg, layer))
    if with_mtp:
        layer = cfg.num_hidden_layers
        add(MTP_PREFIX, layer, MTP_RULES, {"always"})
        add(MTP_LAYER_PREFIX, layer, LAYER_RULES, _kinds(cfg, layer))
    return found


def quantized_params(cfg: ModelConfig, *, with_mtp: bool) -> dict[str, Blocks]:
    """Path -> blocks of the parameters that the config's quantised checkpoint has in blocks.

    Those whose rule says so and none of whose tensors is listed as not quantised; none without a
    `quantization_config`.
    """
    stored = block_format(cfg.quantization)
    if cfg.quantization is None or stored is None:
        return {}
    is_kept = kept_modules(cfg.quantization)
    return {
        path: Blocks(stored.kind, source.blocks(stored.block))
        for path, source in sources(cfg, with_mtp=with_mtp).items()
        if source.quantized and not any(map(is_kept, source.names))
    }


def _kinds(cfg: ModelConfig, layer: int) -> set[str]:
    """The values of `Rule.when` that hold for a layer; `num_hidden_layers` is the MTP layer."""
    return {
        "always",
        "full" if cfg.is_full(layer) else "shared",
        "sparse" if cfg.is_sparse(layer) else "dense",
    }


def is_ignorable(name: str, cfg: ModelConfig, *, with_mtp: bool, names: Container[str]) -> bool:
    """Whether a tensor that no parameter needs may stand in a sound checkpoint of this model."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return cfg.tie_word_embeddings
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return False
    layer, rest = int(match[1]), match[2]
    if layer < cfg.num_hidden_layers:
        # A runtime override of index_topk_freq makes layers shared that have their indexer stored.
        return rest.startswith("self_attn.indexer.") and not cfg.is_full(layer)
    if with_mtp:
        return layer == cfg.num_hidden_layers and rest in MTP_COPIES
    extra = layer - cfg.num_hidden_layers
    return extra < cfg.num_nextn_predict_layers or f"model.layers.{layer}.eh_proj.weight" in names
