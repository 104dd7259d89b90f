"""How close a step was to another result: margins of the selections, gaps of the logits.

Two runs that differ in the last bits (another dcp_size, path or dtype) may select other keys only
where the K-th and the next score are within rounding of each other, and answer otherwise only where
two logits are. These functions measure both on one device in float32, from the public functions of
the package: `forward` of the first layers gives the input of the next one, the caches hold its
keys, and the reference scores them.

    near = margins("tiny-dsa", [1, 2, 3, 4])
    near.logit_gap, near.topk_margin[layer]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dcp_jax.cache.pool import CacheSpec, KVCache
from dcp_jax.config import ModelConfig
from dcp_jax.dcp.step import Batch, StepOptions
from dcp_jax.functional import forward, init_cache, load_params
from dcp_jax.layers.norms import rms_norm
from dcp_jax.layers.rope import apply_rope, rope_table
from dcp_jax.mesh import make_mesh
from dcp_jax.model import Model
from dcp_jax.named import find_model

PAGE_SIZE = 64


@dataclass(frozen=True)
class Margins:
    """Of the token after a prompt.

    Attributes:
        logit_gap: the largest logit less the second largest.
        topk_margin: per full layer, the K-th largest index score of the last token less the next
            one; inf where the layer selects all there is.
        topk_scale: per full layer, the standard deviation of those scores: what a margin is small
            or large beside.
    """

    logit_gap: float
    topk_margin: dict[int, float]
    topk_scale: dict[int, float]

    @property
    def least(self) -> float:
        """The smallest margin over the layers, in standard deviations of the scores."""
        return min(m / (self.topk_scale[layer] or 1.0) for layer, m in self.topk_margin.items())


class MarginMeter:
    """A checkpoint on one device in float32, ready to measure prompts of up to `tokens` tokens."""

    def __init__(self, directory: str | Path, *, tokens: int, chunk: int = 1024):
        """Loads the weights.

        Args:
            directory: a checkpoint, or the name of a model in the box.
            tokens: of the longest prompt.
            chunk: tokens of a step; every step has this size.
        """
        directory = find_model(directory)
        self.cfg = ModelConfig.from_hf(directory)
        self.model = Model(self.cfg, make_mesh(1), jnp.dtype("float32"))
        self.params = load_params(directory, self.model)
        self.tokens, self.chunk = tokens, chunk
        self._opts = StepOptions(PAGE_SIZE, logits="last")
        self.spec, _ = self._empty()
        # A step per chunk: its caches are those of the one before.
        self._step = jax.jit(
            partial(forward, self.model, spec=self.spec, opts=self._opts), donate_argnums=1
        )
        self._inputs = {
            layer: jax.jit(partial(self._input_of, layer)) for layer in self.cfg.full_layers
        }

    def measure(self, token_ids: Sequence[int]) -> Margins:
        """Margins of the last token of a prompt.

        Raises:
            ValueError: an empty prompt, or one longer than the caches.
        """
        logits, scores = self._read(token_ids)
        second, first = np.sort(logits)[-2:]
        k, margin, scale = self.cfg.index_topk, {}, {}
        for layer, of_layer in scores.items():
            best = np.sort(of_layer)[::-1]
            margin[layer] = float(best[k - 1] - best[k]) if len(best) > k else np.inf
            scale[layer] = float(np.std(of_layer))
        return Margins(float(first - second), margin, scale)

    def scores(self, token_ids: Sequence[int]) -> dict[int, np.ndarray]:
        """Per full layer, float32 [S]: index scores of the last token over all S positions.

        Raises:
            ValueError: as `measure`.
        """
        return self._read(token_ids)[1]

    def _read(self, token_ids: Sequence[int]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Logits [V] after the prompt, and the last token's scores."""
        if not 1 <= len(token_ids) <= self.tokens:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens cannot be measured with room for "
                f"{self.tokens}: give 1 to that many."
            )
        _, cache = self._empty()
        out = None
        for start in range(0, len(token_ids), self.chunk):
            part = list(token_ids[start : start + self.chunk])
            out, cache = self._step(self.params, cache, self._batch(part, start, self.chunk))
        assert out is not None
        last = self._batch([token_ids[-1]], len(token_ids) - 1, 1)
        scores = {
            layer: np.asarray(
                self._scores(layer, read(self.params, cache, last), cache, len(token_ids))
            )
            for layer, read in self._inputs.items()
        }
        return np.asarray(out.logits)[0, 0, : self.cfg.vocab_size], scores

    def _empty(self) -> tuple[CacheSpec, KVCache]:
        return init_cache(self.model, tokens=self.tokens, page_size=PAGE_SIZE)

    def _batch(self, tokens: list[int], start: int, width: int) -> Batch:
        """One row; its pages are in order, so a position is its own row of the pool."""
        return Batch(
            tokens=jnp.array([tokens + [0] * (width - len(tokens))]),
            starts=jnp.array([start]),
            lengths=jnp.array([len(tokens)]),
            page_table=jnp.arange(self.spec.pages)[None],
        )

    def _input_of(
        self, layer: int, params: dict[str, Any], cache: KVCache, batch: Batch
    ) -> Float[Array, " d"]:
        """Input of a layer's attention at the batch's only token, which the caches hold already.

        A model of the layers before it, whose final norm is this layer's first one, returns it.
        """
        norm = params["layers"][str(layer)]["input_layernorm"]
        if layer == 0:
            x = params["embed"][batch.tokens]
            return rms_norm(x, norm, self.cfg.rms_norm_eps)[0, 0]
        before = Model(
            replace(
                self.cfg,
                num_hidden_layers=layer,
                indexer_types=self.cfg.indexer_types[:layer],
                mlp_layer_types=self.cfg.mlp_layer_types[:layer],
                num_nextn_predict_layers=0,
            ),
            self.model.mesh,
            self.model.dtype,
        )
        layers = {str(i): params["layers"][str(i)] for i in range(layer)}
        opts = replace(self._opts, logits="none", return_hidden=True)
        given = {**params, "layers": layers, "norm": norm}
        out, _ = forward(before, given, cache, batch, spec=self.spec, opts=opts)
        assert out.hidden is not None
        return jnp.asarray(out.hidden)[0, 0]

    def _scores(
        self, layer: int, x: Float[Array, " d"], cache: KVCache, visible: int
    ) -> Float[Array, " S"]:
        """Index scores of a token over the first `visible` positions, by the formula.

        score[u] = sum_h weights[h] relu(q[h] . k[u]), weights scaled by (heads * dim)^-0.5
        """
        cfg, attention = self.cfg, self.params["layers"][str(layer)]["attn"]
        indexer = attention["indexer"]
        with jax.default_matmul_precision("highest"):
            latent = rms_norm(
                attention["q_a_proj"] @ x, attention["q_a_layernorm"], cfg.latent_norm_eps
            )
            q = jnp.einsum("hdq,q->hd", indexer["wq_b"], latent)
            rope = rope_table(cfg.rope, cfg.qk_rope_head_dim, jnp.array([[visible - 1]]))
            turned = apply_rope(
                q[None, None, :, : cfg.qk_rope_head_dim],
                rope,
                interleaved=cfg.indexer_rope_interleave,
            )[0, 0]
            q = jnp.concatenate([turned, q[:, cfg.qk_rope_head_dim :]], axis=-1)
            heads, dim = q.shape
            weights = indexer["weights_proj"] @ x * (heads * dim) ** -0.5
            first = cfg.index_ordinal(layer) * self.spec.index_rows
            keys = cache.index_k[first : first + visible]
            return weights @ jax.nn.relu(q @ keys.T)


def margins(directory: str | Path, token_ids: Sequence[int]) -> Margins:
    """Margins of the last token of one prompt: see `MarginMeter`."""
    return MarginMeter(directory, tokens=len(token_ids)).measure(token_ids)
