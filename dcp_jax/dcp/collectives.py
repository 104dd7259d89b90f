"""The exchanges between DCP ranks, one function each: called inside `shard_map`, on local arrays.

Payloads are what one rank *sends to each other rank*, in bytes, for B*T = n query tokens, H local
heads (padded), W ranks, C candidates. With one rank no collective is issued at all.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dcp_jax.mesh import DCP, TP
from pallas_kernels.lse_merge import merge_partials, merge_weights
from pallas_kernels.topk import Candidates, pack_candidates, unpack_candidates


def axis_size(axis: str | tuple[str, ...]) -> int:
    """Number of ranks along `axis`: a Python int, known while tracing."""
    names = (axis,) if isinstance(axis, str) else axis
    size = 1
    for name in names:
        size *= jax.lax.axis_size(name)
    return size


def tp_sum(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Sum of row-parallel partial products over the whole tensor-parallel group."""
    if axis_size(TP) == 1:
        return x
    with jax.named_scope("exchange.tp_sum"):
        return jax.lax.psum(x, TP)


def tp_rank() -> Array:
    """Index of this rank's shard of a weight (model-major)."""
    return jax.lax.axis_index(TP)


def gather_heads(q: Shaped[Array, "B T H D"]) -> Shaped[Array, "B T WH D"]:
    """Queries of every head of the DCP group. Payload n*H*(kv_lora_rank + rope dim)*itemsize."""
    if axis_size(DCP) == 1:
        return q
    with jax.named_scope("exchange.q"):
        return jax.lax.all_gather(q, DCP, axis=2, tiled=True)


def gather_candidates(candidates: Candidates, *, wide: bool) -> Candidates:
    """Every rank's candidates, leading axis W. Payload n*C*6 bytes, n*C*8 if `wide`.

    Keys and indices travel packed in one exchange; `wide` sends 32-bit local indices, needed from
    65,537 keys a rank on.
    """
    packed = pack_candidates(candidates, wide=wide)
    with jax.named_scope("exchange.candidates"):
        everyone = jax.lax.all_gather(packed, DCP, axis=0)
    return unpack_candidates(everyone, wide=wide)


def gather_keys(rows: Shaped[Array, "B S *D"], kind: str) -> Shaped[Array, "B WS *D"]:
    """Rows of a cache (`kind`: "latent" or "index_k") in order of position.

    Local index s of rank r lands at s*W + r. Payload: the bytes of `rows`.
    """
    if axis_size(DCP) == 1:
        return rows
    with jax.named_scope(f"exchange.{kind}"):
        gathered = jax.lax.all_gather(rows, DCP, axis=2)
    return gathered.reshape(rows.shape[0], -1, *rows.shape[2:])


def gather_vocab(logits: Float[Array, "B V"]) -> Float[Array, "B NV"]:
    """Logits of the whole (padded) vocabulary. Payload B*V/N*4."""
    if axis_size(TP) == 1:
        return logits
    with jax.named_scope("exchange.logits"):
        return jax.lax.all_gather(logits, TP, axis=1, tiled=True)


@jax.custom_jvp
def _bits(x: Float[Array, "*S"]) -> Shaped[Array, "*T"]:
    """16-bit words of 16- or 32-bit floats (a float32 becomes two, on a new last axis)."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


@_bits.defjvp
def _no_derivative(primals, tangents):
    raise NotImplementedError(
        "dcp_comm='a2a' with 16-bit activations has no derivative, because they travel as bits: "
        "use dcp_comm='ag_rs', PrefillPath.GATHERED or float32."
    )


def merge_heads_a2a(
    out: Float[Array, "B T WH D"], lse: Float[Array, "B T WH"], dtype: jnp.dtype
) -> Float[Array, "B T H D"]:
    """LSE-merge partial attention over the ranks, each keeping its own heads; one all-to-all.

    `out` travels as `dtype` beside its float32 lse: payload n*H*(D*itemsize(dtype) + 4).
    Arithmetic of the merge is float32.
    """
    size = axis_size(DCP)
    if size == 1:
        return out.astype(dtype)
    # Beside 16-bit outputs the float32 lse travels as two halves, all of it as integers: as floats
    # of 16 bits, halves that look like NaN would not survive every backend.
    narrow = jnp.dtype(dtype).itemsize == 2
    parts = (_bits(out.astype(dtype)), _bits(lse)) if narrow else (out, lse[..., None])
    packed = jnp.concatenate(parts, axis=-1)
    batch, tokens, heads, width = packed.shape
    packed = packed.reshape(batch, tokens, size, heads // size, width)
    # The split axis becomes the axis of senders: [B, T, W, H, .] -> one partial per rank.
    with jax.named_scope("exchange.merge"):
        packed = jax.lax.all_to_all(packed, DCP, split_axis=2, concat_axis=2, tiled=True)
    dim = out.shape[-1]
    outs, lses = packed[..., :dim], packed[..., dim:]
    if narrow:
        outs = jax.lax.bitcast_convert_type(outs, dtype)
        lses = jax.lax.bitcast_convert_type(lses, jnp.float32)
    else:
        lses = lses[..., 0]
    merged, _ = merge_partials(jnp.moveaxis(outs, 2, 0), jnp.moveaxis(lses, 2, 0))
    return merged.astype(dtype)


def merge_heads_ag_rs(
    out: Float[Array, "B T WH D"], lse: Float[Array, "B T WH"], dtype: jnp.dtype
) -> Float[Array, "B T H D"]:
    """The same merge by an all-gather of lse (n*W*H*4) and a float32 reduce-scatter (n*H*D*4)."""
    if axis_size(DCP) == 1:
        return out.astype(dtype)
    with jax.named_scope("exchange.merge"):
        lses = jax.lax.all_gather(lse, DCP, axis=0)
    share = merge_weights(lses)[jax.lax.axis_index(DCP)][..., None]
    # Select, never multiply by zero: the out of an empty shard may be anything.
    weighted = jnp.where(share == 0, 0.0, out.astype(jnp.float32) * share)
    with jax.named_scope("exchange.merge"):
        merged = jax.lax.psum_scatter(weighted, DCP, scatter_dimension=2, tiled=True)
    return merged.astype(dtype)


MERGE_HEADS = {"a2a": merge_heads_a2a, "ag_rs": merge_heads_ag_rs}
