"""What one step is (`StepOptions`, static) and its index arithmetic (`DcpStep`, once a step).

Every layer reads `DcpStep`; nothing in it is derived again per layer. All row numbers are those of
*one layer's region* of a pool; a layer adds its own base.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dcp_jax.dcp import layout
from dcp_jax.mesh import DCP
from dcp_jax.policy import PrefillPath
from pallas_kernels.topk import candidate_capacity

# int32 array of numpy (the host builds batches so) or of jax (in a traced step).
IntArray = Any

DCP_COMMS = ("a2a", "ag_rs")
INDEX_CACHES = ("sharded", "replicated")


@dataclass(frozen=True)
class StepOptions:
    """Static choices of a step: each distinct value is one executable.

    Attributes:
        page_size: rows per page and rank.
        path: how attention meets the cache; decode is `OWNED`.
        dcp_comm: collectives of the LSE merge.
        index_cache: index K sharded over the ranks, or whole on each of them.
        candidates: how many candidates a rank sends per query token: "pruned" (the capacity that
            random text all but never exceeds), "full" (`index_topk`, always exact) or a number.
        gather_chunk_tokens: keys gathered at a time by the `GATHERED` kinds, over all ranks and
            rows.
        with_prefix: rows may have tokens in the cache; False leaves out the gather of them on
            `MHA_ONE_SHOT`, the only path that asks.
        logits: at which query tokens logits are returned.
        return_hidden: also return the final hidden states (input of the MTP layer).
        explain: also return selections and expert choices.
        index_hadamard: rotate index queries and keys; None does so exactly when index K is e4m3.
        kernels: implementation of every op, None for the best available one.
    """

    page_size: int
    path: PrefillPath = PrefillPath.OWNED
    dcp_comm: Literal["a2a", "ag_rs"] = "a2a"
    index_cache: Literal["sharded", "replicated"] = "sharded"
    candidates: Literal["pruned", "full"] | int = "pruned"
    gather_chunk_tokens: int = 32768
    with_prefix: bool = True
    logits: Literal["none", "last", "all"] = "none"
    return_hidden: bool = False
    explain: bool = False
    index_hadamard: bool | None = None
    kernels: str | None = None

    def candidate_count(self, index_topk: int, dcp_size: int) -> int:
        """Candidates that each rank offers per query token."""
        if dcp_size == 1 or self.index_cache == "replicated" or self.candidates == "full":
            return index_topk
        if self.candidates == "pruned":
            return candidate_capacity(index_topk, dcp_size)
        return min(self.candidates, index_topk)


class Batch(NamedTuple):
    """One step's input: B rows of up to T new tokens each, padded on the right.

    Attributes:
        tokens: int32 [B, T].
        starts: int32 [B], tokens of the row that are in the cache already.
        lengths: int32 [B], new tokens of the row in this step; 0 makes the row inert.
        page_table: int32 [B, P], pages of the row in order; -1 where none is assigned.
    """

    tokens: IntArray
    starts: IntArray
    lengths: IntArray
    page_table: IntArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DcpStep:
    """This rank's view of a batch.

    Attributes:
        rank: int32 scalar, index on the `dcp` axis.
        positions: int32 [B, T]; valid: bool [B, T], False for padding.
        visible: int32 [B, T], keys that the token may attend to (itself included); 0 for padding.
        local_visible: int32 [B, T], those of them that this rank owns.
        write_rows: int32 [B, T], row of the token here, -1 if another rank owns it.
        index_write_rows: int32 [B, T], its row in an index cache replicated on every rank.
        page_table: int32 [B, P].
    """

    rank: Int[Array, ""]
    positions: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    visible: Int[Array, "B T"]
    local_visible: Int[Array, "B T"]
    write_rows: Int[Array, "B T"]
    index_write_rows: Int[Array, "B T"]
    page_table: Int[Array, "B P"]


def make_step(batch: Batch, page_size: int, rank: Int[Array, ""], dcp_size: int) -> DcpStep:
    """Localise a batch for `rank` of `dcp_size` ranks: pure, so tests call it without devices."""
    tokens = batch.tokens.shape[1]
    offsets = jnp.arange(tokens, dtype=jnp.int32)
    valid = offsets < batch.lengths[:, None]
    positions = batch.starts[:, None] + offsets
    visible = jnp.where(valid, positions + 1, 0)
    page_number = layout.page_of(positions, page_size, dcp_size)
    # Beyond the table there is no page; clipping would write over the row's last one.
    pages = jnp.take_along_axis(batch.page_table, page_number, axis=1, mode="fill", fill_value=-1)
    slots = jnp.where(valid, layout.slot_of(pages, positions, page_size, dcp_size), -1)
    mine = layout.owner(slots, dcp_size) == rank
    return DcpStep(
        rank=rank,
        positions=positions,
        valid=valid,
        visible=visible,
        local_visible=layout.local_length(visible, rank, dcp_size),
        write_rows=jnp.where(mine, layout.row(slots, dcp_size), -1),
        index_write_rows=slots,
        page_table=batch.page_table,
    )


def step_here(batch: Batch, page_size: int) -> DcpStep:
    """`make_step` for the calling rank, inside `shard_map`."""
    return make_step(batch, page_size, jax.lax.axis_index(DCP), jax.lax.axis_size(DCP))
