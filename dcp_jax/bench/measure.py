"""Interleaved timing of programs, and whether their outputs agree."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dcp_jax.bench.records import Agreement, Times
from dcp_jax.dcp import layout
from dcp_jax.layers.indexer import Selection
from dcp_jax.policy import PrefillPath

# Float32 computes with highest precision: what is off there sits at near-ties of the selection,
# which rounding decides. In low precision some tokens of a selection differ between paths, too.
OFF_ERROR = {"float32": 1e-4, "bfloat16": 0.03}
OFF_SHARE = {"float32": 0.03, "bfloat16": 0.1}
LEAST_COSINE = 0.99
NEAR_TIE = 1e-4  # margin at the last selected place, of the spread of a token's scores
SAMPLED_TOKENS = 64  # query tokens of each row whose selected sets are compared


def time_runs[Key: Hashable](
    runs: Mapping[Key, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Times]:
    """Times of each run, taken in turns so that drifts of the machine meet all of them alike.

    A run must wait for its result. The order is rotated from round to round.
    """
    order, taken = list(runs), {key: [] for key in runs}
    for number in range(repeats):
        turn = number % len(order)
        for key in order[turn:] + order[:turn]:
            started = clock()
            runs[key]()
            taken[key].append(clock() - started)
    return {
        key: Times(statistics.median(times), min(times), max(times), repeats)
        for key, times in taken.items()
    }


@jax.jit
def _errors(
    y: Float[Array, "B T d"], reference: Float[Array, "B T d"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T 3"]]:
    """Relative error of each token, and the sums that the cosine of any part of them needs."""
    y, reference = y.astype(jnp.float32), reference.astype(jnp.float32)
    norm = jnp.linalg.norm(reference, axis=-1)
    error = jnp.linalg.norm(y - reference, axis=-1) / jnp.maximum(norm, 1e-30)
    products = (jnp.sum(a * b, -1) for a, b in ((y, reference), (y, y), (reference, reference)))
    return error, jnp.stack(tuple(products), -1)


def sample_of(tokens: int) -> np.ndarray:
    """Query tokens whose selections are compared: spread evenly, first and last included."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, SAMPLED_TOKENS)).round().astype(int))


def selected_sets(
    selection: Selection, path: PrefillPath, tokens: np.ndarray, rows: int
) -> list[np.ndarray]:
    """Selected positions, ascending, of each sampled token of each row.

    Args:
        selection: with a leading axis of ranks, as a timed layer returns it.
        path: its path.
        tokens: sampled query tokens.
        rows: real rows of the batch.
    """
    index = np.asarray(selection.index[:, :rows, tokens])
    counts = np.asarray(selection.counts[:, :rows, tokens])
    ranks = index.shape[0]
    real = np.arange(index.shape[-1]) < counts[..., None]
    if path.gathers or ranks == 1:  # every rank has the whole selection
        index, real = index[:1], real[:1]
    else:
        rank = np.arange(ranks).reshape(-1, 1, 1, 1)
        index = layout.position_of(index, rank, ranks)
    return [np.sort(index[:, b, t][real[:, b, t]]) for b in range(rows) for t in range(len(tokens))]


def near_ties(scores: np.ndarray, visible: np.ndarray, index_topk: int) -> Bool[np.ndarray, " n"]:
    """Tokens whose last selected key is within rounding of the next one.

    Args:
        scores: float32 [n, S], -inf where a key is not visible.
        visible: int [n].
        index_topk: K.
    """
    if scores.shape[-1] <= index_topk:
        return np.zeros(len(scores), bool)
    # Scores of visible keys are finite, so the spread of a row is that of its finite ones.
    top = -np.partition(-scores, (0, index_topk - 1, index_topk), axis=-1)
    finite = np.where(np.isfinite(scores), scores, np.inf)
    spread = top[:, 0] - finite.min(axis=-1)
    with np.errstate(invalid="ignore"):
        margin = top[:, index_topk - 1] - top[:, index_topk]
    return (visible > index_topk) & ~(margin > NEAR_TIE * spread)


def agreement(
    y: Float[Array, "B T d"],
    reference: Float[Array, "B T d"],
    reference_path: PrefillPath,
    valid: Bool[np.ndarray, "B T"],
    *,
    exact: bool,
    sets: tuple[list[np.ndarray], list[np.ndarray]] | None = None,
    ties: Bool[np.ndarray, " n"] | None = None,
    uncertified: int = 0,
) -> Agreement:
    """Compare an output with that of another path.

    Args:
        y: output.
        reference: output of `reference_path`.
        reference_path: path compared with.
        valid: real tokens.
        exact: float32, else bfloat16.
        sets: selected sets of both, if both select; equal in float32 outside `ties`.
        ties: sampled tokens that are near-ties; None: not known, as in low precision.
        uncertified: tokens whose candidates were not certified.
    """
    dtype = "float32" if exact else "bfloat16"
    errors, products = (np.asarray(part)[valid] for part in _errors(y, reference))
    dot, own, other = products.sum(axis=0, dtype=np.float64)
    off = float((~(errors <= OFF_ERROR[dtype])).mean())
    cosine = min(float(dot / np.sqrt(max(own * other, 1e-300))), 1.0)  # float32 sums exceed it
    unequal, missed, sampled = 0, 0.0, 0
    if sets is not None:
        sampled = len(sets[0])
        differ = np.array([not np.array_equal(a, b) for a, b in zip(*sets, strict=True)])
        unequal = int((differ if ties is None else differ & ~ties).sum())
        common = sum(len(np.intersect1d(a, b)) for a, b in zip(*sets, strict=True))
        missed = 1 - common / max(sum(len(b) for b in sets[1]), 1)
    worst = float(errors.max())
    return Agreement(
        reference=reference_path,
        off=off,
        worst=worst if np.isfinite(worst) else float(np.finfo(np.float32).max),
        cosine=cosine if np.isfinite(cosine) else -1.0,
        sampled=sampled,
        near_ties=0 if ties is None else int(ties.sum()),
        unequal_sets=unequal,
        missed=missed,
        uncertified=uncertified,
        agrees=off <= OFF_SHARE[dtype]
        and cosine >= LEAST_COSINE
        and not (exact and unequal)
        and uncertified == 0,
    )
