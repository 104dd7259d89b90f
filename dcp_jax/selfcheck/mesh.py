"""Areas of the self-check on meshes: the exchanges, and a whole model at each dcp_size.

The truth for the model is dcp_size 1 with every prefix as a prompt of its own, in the first and
only step of fresh caches: no page is written twice and no table is read twice. Everything else must
give the same logits: chunks, decode, shuffled pages, every dcp_size and every exchange.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcp_jax.config import ModelConfig
from dcp_jax.dcp import collectives
from dcp_jax.dcp.layout import padded
from dcp_jax.dcp.step import DCP_COMMS
from dcp_jax.devices import ensure_devices
from dcp_jax.engine.runner import Row, Runner
from dcp_jax.llm import LLM
from dcp_jax.mesh import DCP, make_mesh
from dcp_jax.policy import PrefillPath
from dcp_jax.selfcheck import DCP_SIZES, EXACT, FLOAT32, Outcome, distance, measure, unequal
from dcp_jax.testing.checkpoints import write_random_checkpoint
from dcp_jax.testing.harness import advance, deal, tiny_config
from pallas_kernels import reference
from pallas_kernels.topk import local_topk, merge_candidates

# Of logits, per token: |a - b| / |b|. In float32 every token counts. Bfloat16 and e4m3 round, a
# rounded bit now and then selects another key or expert, and that token is another one then: the
# median counts.
EVERY_TOKEN, MEDIAN = 1e-3, 0.05
TAIL = 2  # tokens of each sequence that are decoded one by one


def available() -> tuple[list[int], dict[int, str]]:
    """The dcp sizes that the devices allow, and why the others are not among them."""
    with contextlib.suppress(ValueError):
        ensure_devices(max(DCP_SIZES))
    count = len(jax.devices())
    missing = {n: f"needs {n} devices and {count} are visible" for n in DCP_SIZES if n > count}
    return [n for n in DCP_SIZES if n <= count], missing


def exchange_checks() -> Iterator[Outcome]:
    """The collectives: candidates to a selection, partial attentions to one, rows in order."""
    sizes, missing = available()
    for size in sizes[1:]:
        found: dict[str, float] = {}

        def errors(size=size, found=found) -> float:
            found.update(_exchange(size))
            return found["selection"]

        first = measure("exchange", f"candidates, W={size}", EXACT, errors)
        yield first
        for name, limit in (("gather", EXACT), *((f"merge {c}", FLOAT32) for c in DCP_COMMS)):
            reason = "" if name in found else first.reason
            yield Outcome("exchange", f"{name}, W={size}", limit, found.get(name), reason)
    for size, reason in missing.items():
        yield Outcome("exchange", f"W={size}", EXACT, reason=reason, skipped=True)


def _exchange(size: int) -> dict[str, float]:
    """Errors of all exchanges over `size` ranks, in one program."""
    rng = np.random.default_rng(size)
    k, n_keys, heads, dim = 6, 24, 2 * size, 8
    lengths = np.array([[0, 1, size - 1, size, k - 1, k, k + 1, n_keys]], np.int32)
    tokens = lengths.shape[1]
    scores = rng.integers(0, 4, (1, tokens, n_keys)).astype(np.float32)
    outs = rng.standard_normal((size, 1, tokens, heads, dim)).astype(np.float32)
    lses = rng.standard_normal((size, 1, tokens, heads)).astype(np.float32)
    lses[0, :, 0], lses[:, :, 1] = -np.inf, -np.inf
    outs = np.where(np.isinf(lses)[..., None], np.nan, outs)
    shards = np.stack([scores[..., rank::size] for rank in range(size)]), outs, lses

    def exchange(shards, lengths):
        scores, out, lse = (x[0] for x in shards)
        rank = jax.lax.axis_index(DCP)
        own = local_topk(scores, (lengths - rank + size - 1) // size, k)
        everyone = collectives.gather_candidates(own, wide=False)
        count, _ = merge_candidates(*everyone, lengths, rank, k=k)
        merged = {c: collectives.MERGE_HEADS[c](out, lse, out.dtype) for c in DCP_COMMS}
        ordered = collectives.gather_keys(jnp.swapaxes(scores, 1, 2), "index_k")
        found = own.index, count, merged, jnp.swapaxes(ordered, 1, 2)
        return jax.tree.map(lambda x: x[None], found)

    mesh = make_mesh(size, size)
    inputs = _put(mesh, shards, P(DCP)), _put(mesh, lengths, P())
    run = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=(P(DCP), P()), out_specs=P(DCP)))
    index, count, merged, ordered = jax.tree.map(np.asarray, run(*inputs))
    mask = np.asarray(reference.selected_positions(jnp.asarray(scores), jnp.asarray(lengths), k))
    chosen = np.zeros_like(mask)
    for rank, b, t in np.ndindex(size, 1, tokens):
        chosen[b, t, index[rank, b, t, : count[rank, b, t]] * size + rank] = True
    want, _ = reference.merge_partials(jnp.asarray(outs), jnp.asarray(lses))
    own_heads = np.stack(np.split(np.asarray(want), size, axis=2))
    return {
        "selection": unequal(chosen, mask),
        "gather": unequal(ordered, np.broadcast_to(scores, ordered.shape)),
        **{f"merge {c}": distance(merged[c], own_heads) for c in DCP_COMMS},
    }


def _put(mesh: Mesh, arrays: Any, spec: P) -> Any:
    return jax.device_put(arrays, NamedSharding(mesh, spec))


def model_checks(
    model: str | Path | None = None,
    sizes: tuple[int, ...] | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> Iterator[Outcome]:
    """A model at every dcp_size against dcp_size 1.

    Args:
        model: checkpoint; default: a tiny random one.
        dtype: of weights and activations.
        sizes: dcp sizes to run, without the variants of the exchanges; default: all, with them.
    """
    allowed, missing = available()
    with tempfile.TemporaryDirectory() as scratch:
        if model is None:
            shape = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
            shape |= {"mlp_layer_types": ["dense", "sparse"], "vocab_size": 32}
            model = write_random_checkpoint(scratch, tiny_config(**shape), seed=1)
            check = _ModelCheck(model, "float32", page_size=2, tp=None)
        else:
            # Weights of a real model are spread as far as they can be, at every dcp_size.
            check = _ModelCheck(model, dtype, page_size=64, tp=allowed[-1])
        yield from check.outcomes(sizes or tuple(allowed), variants=sizes is None)
    if sizes is None:
        for size, reason in missing.items():
            yield Outcome("model", f"W={size}", 0.0, reason=reason, skipped=True)


class _ModelCheck:
    """One checkpoint, the sequences that it reads, and the logits that they must have."""

    def __init__(self, model: str | Path, dtype: str, page_size: int, tp: int | None):
        self.model, self.page_size, self.tp = model, page_size, tp
        self.config = ModelConfig.from_hf(model)
        self.dtype: Any = self.config.dtype if dtype == "auto" else dtype
        k, page, most = self.config.index_topk, page_size * 8, self.config.max_position_embeddings
        lengths = {1, 7, 8, 9, page, page + 1, k - 1, k, k + 1, k + page}
        rng = np.random.default_rng(0)
        self.sequences = [
            rng.integers(0, self.config.vocab_size, n).tolist()
            for n in sorted(lengths)
            if 1 <= n <= most
        ]

    def outcomes(self, sizes: tuple[int, ...], variants: bool) -> Iterator[Outcome]:
        """Every size; with `variants`, every exchange and cache at the largest."""
        compare = partial(self._compare, self._truth())
        runner = None
        for size in sizes:
            decode = size in (sizes[0], sizes[-1])  # its program is one more to compile
            name = f"W={size}, chunks" + (" and decode" if decode else "")
            runner = self._runner(size)
            yield self._measure(name, partial(compare, runner, decode=decode))
        if not variants or runner is None or sizes[-1] == 1:
            return
        largest = f"W={sizes[-1]}"
        changes = {"path": PrefillPath.GATHERED, "candidates": "full"}
        compute = partial(compare, runner, **changes)
        yield self._measure(f"{largest}, gathered prefill, full candidates", compute)
        runner = self._runner(sizes[-1], index_cache="replicated")
        compute = partial(compare, runner, dcp_comm="ag_rs")
        yield self._measure(f"{largest}, replicated index, ag_rs", compute)
        truth = self._truth(kv_cache_dtype="fp8")
        runner = self._runner(sizes[-1], kv_cache_dtype="fp8")
        compute = partial(self._compare, truth, runner)
        yield self._measure(f"{largest}, e4m3 caches", compute, rounded=True)

    def _measure(self, name, errors, rounded: bool = False) -> Outcome:
        if rounded or self.dtype != "float32":
            return measure("model", f"{name}, median", MEDIAN, lambda: np.median(errors()))
        return measure("model", name, EVERY_TOKEN, lambda: np.max(errors()))

    def _runner(self, size: int, **options) -> Runner:
        tokens = sum(padded(n, self.page_size * 8) for ends in self._ends() for n in ends)
        llm = LLM(
            self.model,
            dtype=self.dtype,
            tp=self.tp or size,
            dcp_size=size,
            page_size=self.page_size,
            max_total_tokens=tokens,
            chunked_prefill_size=max(map(len, self.sequences)),
            **options,
        )
        return llm.engine.runner

    def _ends(self) -> list[tuple[int, ...]]:
        """Where the steps of each sequence end: two chunks, then one token at a time."""
        ends = []
        for tokens in self.sequences:
            prompt = max(1, len(tokens) - TAIL)
            ends.append(tuple(sorted({-(-prompt // 2), *range(prompt, len(tokens) + 1)})))
        return ends

    def _truth(self, **options) -> dict[tuple[int, int], np.ndarray]:
        """Logits after each end of each sequence, by (sequence, end)."""
        runner = self._runner(1, **options)
        asked = [(i, end) for i, ends in enumerate(self._ends()) for end in ends]
        prompts = [self.sequences[i][:end] for i, end in asked]
        logits = advance(runner, deal(runner, prompts, seed=None), logits="last").logits
        return {key: logits[row, -1] for row, key in enumerate(asked)}

    def _compare(self, truth, runner: Runner, *, decode: bool = False, **changes) -> list[float]:
        """Errors of all steps of all sequences, whose pages are dealt anew."""
        sequences = deal(runner, self.sequences, seed=7)
        width = max(len(sequence.pages) for sequence in sequences)
        ends = self._ends()
        errors = []
        for step in range(max(map(len, ends)) if decode else 2):
            due = [i for i in range(len(ends)) if step < len(ends[i])]
            rows = []
            for i in due:
                start = ends[i][step - 1] if step else 0
                rows.append(
                    Row(self.sequences[i][start : ends[i][step]], start, sequences[i].pages)
                )
            got = runner.step(rows, table_width=width, logits="last", **changes).logits
            for row, i in enumerate(due):
                want = truth[i, ends[i][step]]
                error = np.linalg.norm(got[row, -1] - want) / np.linalg.norm(want)
                errors.append(float(error))
        return errors
