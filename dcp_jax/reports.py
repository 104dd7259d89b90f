"""What `LLM.score` and `LLM.explain` return, put together from the arrays of the steps."""

from dataclasses import dataclass

import numpy as np

from dcp_jax.model import Explanation
from dcp_jax.policy import PrefillPath


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's own tokens.

    Attributes:
        token_logprobs: float32 [n]; entry i is that of token `positions[i] + 1` given all before.
        positions: int32 [n].
        top_token_ids: int32 [n, k], the k most likely tokens, best first.
        top_logprobs: float32 [n, k].
    """

    token_logprobs: np.ndarray
    positions: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class ExplainReport:
    """What the steps of a prefill selected and exchanged.

    Attributes:
        prefill_paths: the path of each chunk.
        topk_indices: per full layer, int32 [T, index_topk]: positions, ascending, -1 pads. A chunk
            of `MHA_ONE_SHOT` attends to every visible position, which is what it lists.
        owned_counts: per full layer, int32 [W, T]: how many of them each rank owns.
        expert_ids: per sparse layer, int32 [T, num_experts_per_tok], ascending.
        bytes_exchanged: bytes that one rank received in all, by kind of exchange.
        reruns: steps that ran a second time with full-width candidates.
    """

    prefill_paths: tuple[PrefillPath, ...]
    topk_indices: dict[int, np.ndarray]
    owned_counts: dict[int, np.ndarray]
    expert_ids: dict[int, np.ndarray]
    bytes_exchanged: dict[str, int]
    reruns: int

    @property
    def prefill_path(self) -> PrefillPath:
        """The path of the last chunk (the only one of a short prompt)."""
        return self.prefill_paths[-1]


def selected_positions(
    positions: np.ndarray, index_topk: int, *, dense: bool = False
) -> np.ndarray:
    """The ranks' shares int32 [W, T, K] (-1: none) as one int32 [T, index_topk], ascending.

    `dense` attention beyond index_topk (an approximation that was asked for) gives wider rows.
    """
    ranks, tokens, width = positions.shape
    flat = np.moveaxis(positions, 0, 1).reshape(tokens, ranks * width)
    none = np.iinfo(np.int32).max
    ordered = np.sort(np.where(flat < 0, none, flat), axis=-1)
    widest = int((ordered != none).sum(axis=-1).max(initial=0))
    if widest > index_topk and not dense:
        raise ValueError(
            f"the ranks selected more than index_topk={index_topk} positions together."
        )
    kept = max(index_topk, widest)
    ordered = ordered[:, :kept]
    missing = kept - ordered.shape[1]
    ordered = np.pad(ordered, ((0, 0), (0, missing)), constant_values=none)
    return np.where(ordered == none, -1, ordered).astype(np.int32)


def row_of(explanation: Explanation, row: int, tokens: int) -> Explanation:
    """One row's part of a batch's explanation, without the padding of its bucket."""
    return Explanation(
        positions={k: v[:, row, :tokens] for k, v in explanation.positions.items()},
        counts={k: v[:, row, :tokens] for k, v in explanation.counts.items()},
        experts={k: np.sort(v[row, :tokens], axis=-1) for k, v in explanation.experts.items()},
    )


def explain_report(
    chunks: list[tuple[PrefillPath, Explanation, dict[str, int], int]],
    index_topk: int,
    layers: tuple[int, ...],
) -> ExplainReport:
    """Put a prompt's chunks together, each (path, one row's explanation, bytes, reruns)."""
    paths, parts, received, reruns = zip(*chunks, strict=True)
    return ExplainReport(
        prefill_paths=paths,
        topk_indices={
            layer: _one_width(
                [
                    selected_positions(
                        part.positions[layer], index_topk, dense=path is PrefillPath.MHA_ONE_SHOT
                    )
                    for path, part in zip(paths, parts, strict=True)
                ]
            )
            for layer in layers
        },
        owned_counts={
            layer: np.concatenate([p.counts[layer] for p in parts], axis=1) for layer in layers
        },
        expert_ids={
            layer: np.concatenate([p.experts[layer] for p in parts]) for layer in parts[0].experts
        },
        bytes_exchanged={
            kind: sum(r.get(kind, 0) for r in received)
            for kind in sorted({k for r in received for k in r})
        },
        reruns=sum(reruns),
    )


def _one_width(parts: list[np.ndarray]) -> np.ndarray:
    """Rows of all parts, padded to the widest by -1."""
    width = max(part.shape[1] for part in parts)
    padded = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in parts]
    return np.concatenate(padded)
