"""Tables for the terminal."""

from rich.table import Table

from dcp_jax.cache.sizing import Capacity
from dcp_jax.reports import ExplainReport


def selection_table(report: ExplainReport) -> Table:
    """Rows that the last token selected, per full layer and rank."""
    table = Table(title="rows selected for the last token")
    ranks = next(iter(report.owned_counts.values())).shape[0]
    table.add_column("layer", justify="right")
    for rank in range(ranks):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("all", justify="right")
    for layer, counts in report.owned_counts.items():
        last = counts[:, -1]
        table.add_row(str(layer), *map(str, last), str(last.sum()))
    return table


def exchange_table(received: dict[str, int]) -> Table:
    """Bytes that one rank receives, by kind of exchange."""
    table = Table(title="bytes received by each rank")
    table.add_column("exchange")
    table.add_column("bytes", justify="right")
    for kind, size in sorted(received.items()):
        table.add_row(kind, f"{size:,}")
    table.add_row("all", f"{sum(received.values()):,}", style="bold")
    return table


def rank_table(capacity: Capacity, tokens: int, owned: list[int], selected: list[int]) -> Table:
    """Per rank: rows of a sequence that it holds, their bytes, and rows selected from them.

    Args:
        capacity: of the caches.
        tokens: tokens of the sequence in the cache.
        owned: rows of it on each rank.
        selected: rows of it that each rank attended over, summed over layers.
    """
    table = Table(title=f"a sequence of {tokens} tokens over {capacity.ranks} ranks")
    for name in ("rank", "rows owned", "latent KV bytes", "index K bytes", "rows selected"):
        table.add_column(name, justify="right")
    per_row = {name: size * capacity.ranks for name, size in capacity.bytes_per_token.items()}
    for rank, (rows, chosen) in enumerate(zip(owned, selected, strict=True)):
        cells = rank, rows, rows * per_row["latent"], rows * per_row["index_k"], chosen
        table.add_row(*(f"{cell:,.0f}" for cell in cells))
    return table
