"""Dense attention of a prompt's queries to the first keys of its row, for heads of their own keys.

    out[t] = sum_{u < visible[t]} softmax(scale * q[t] . k[u]) v[u]

`visible` covers a causal prefill (t + 1), one behind a prefix (prefix + t + 1), and padding (0,
whose output is 0).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.blocking import BUDGET_BYTES, block_size, map_blocks
from pallas_kernels.dispatch import pick


def dense_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S H D"],
    v: Float[Array, "B S H V"],
    visible: Int32[Array, "B T"],
    *,
    scale: float,
    implementation: str | None = None,
    budget: int = BUDGET_BYTES,
) -> Float[Array, "B T H V"]:
    """Attention in q's dtype with float32 softmax; nothing of k and v may be NaN.

    Args:
        q: queries.
        k: keys; a row's visible ones come first.
        v: values.
        visible: keys that each query attends to.
        scale: the softmax scale.
        implementation: see `dispatch`; "cudnn" is the flash attention that `jax.nn` calls.
        budget: bytes of scores at a time (at least one query's).
    """
    table = {"cudnn": _dense_attention_cudnn, "xla": _dense_attention_xla}
    return pick("dense_attention", implementation, table)(
        q, k, v, visible, scale=scale, budget=budget
    )


def _dense_attention_xla(q, k, v, visible, *, scale, budget):
    batch, tokens, heads, _ = q.shape
    keys = k.shape[1]
    per_query = keys * heads * 12  # scores, their exponentials, and those as the product takes them
    batch_block = block_size(batch, per_query, budget)
    token_block = block_size(tokens, per_query * batch_block, budget)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT

    def dot(spec, a, b):
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)

    def batch_rows(q, k, v, visible):
        def queries(q, visible):
            seen = jnp.arange(keys, dtype=jnp.int32) < visible[:, None, :, None]
            scores = jnp.where(seen, dot("bthd,bshd->bhts", q, k) * scale, -jnp.inf)
            top = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
            total = jnp.sum(weights, axis=-1)
            out = dot("bhts,bshv->bthv", weights.astype(q.dtype), v)
            total = jnp.moveaxis(total, 1, 2)[..., None]
            return (out / jnp.where(total == 0, 1.0, total)).astype(q.dtype)

        return map_blocks(queries, (q, visible), axis=1, block=token_block)

    with jax.named_scope("dense_attention"):
        return map_blocks(batch_rows, (q, k, v, visible), axis=0, block=batch_block)


def _dense_attention_cudnn(q, k, v, visible, *, scale, budget):
    """cuDNN's flash attention; it takes one head size, so narrower values are padded."""
    dim, value = q.shape[-1], v.shape[-1]
    if jax.default_backend() != "gpu" or "cuda" not in jax.devices()[0].client.platform_version:
        raise NotImplementedError("cuDNN needs an NVIDIA GPU")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN has no {q.dtype} attention")
    if dim % 8 or dim > 256 or value > dim or q.shape[1] % 2 or k.shape[1] % 2:
        raise NotImplementedError(f"cuDNN does not take head sizes {dim}, {value} or odd lengths")

    def flash(q, k, v, visible):
        seen = jnp.arange(k.shape[1], dtype=jnp.int32) < visible[:, None, :, None]
        padded = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, dim - value)))
        out = jax.nn.dot_product_attention(
            q, k, padded, mask=seen, scale=scale, implementation="cudnn"
        )
        return jnp.where(visible[..., None, None] > 0, out[..., :value], 0)

    def blocked(q, k, v, visible):
        return _dense_attention_xla(q, k, v, visible, scale=scale, budget=budget)

    with jax.named_scope("dense_attention"):
        # A process with GPUs may trace for its CPU too.
        return lax.platform_dependent(q, k, v, visible, cuda=flash, default=blocked)
