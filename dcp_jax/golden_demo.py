"""The demonstration on a golden case: dcp_size 1 and W, and the tokens of the reference."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dcp_jax.dcp.layout import local_length
from dcp_jax.devices import ensure_devices
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.llm import LLM
from dcp_jax.tables import exchange_table, rank_table, selection_table


def run(case: Path, dcp_size: int, console: Console) -> bool:
    """Generate at both sizes, print what happened, and say whether all tokens agree.

    Args:
        case: a golden case: a checkpoint directory with `golden.npz` beside the weights.
        dcp_size: ranks of the second run.
        console: where to print.

    Raises:
        ValueError: the directory is not a golden case.
    """
    if not (case / "golden.npz").is_file():
        raise ValueError(f"{case} has no golden.npz: give a directory of tests/golden.")
    with np.load(case / "golden.npz") as golden:
        prompt, expected = golden["greedy_prompt"].tolist(), golden["greedy_tokens"].tolist()
    ensure_devices(dcp_size)
    params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
    runs = {"reference": expected}
    for ranks in dict.fromkeys((1, dcp_size)):
        console.print(f"[bold]dcp_size={ranks}[/]: loading, compiling, generating ...")
        llm = LLM(case, tp=ranks, dcp_size=ranks, dtype="float32", page_size=4)
        (output,) = llm.generate(prompt, params)
        runs[f"dcp_size={ranks}"] = output.outputs[0].token_ids

    sequence = prompt + expected[:-1]
    report = llm.explain(sequence)
    owned = [local_length(len(sequence), rank, dcp_size) for rank in range(dcp_size)]
    selected = np.sum([counts[:, -1] for counts in report.owned_counts.values()], axis=0)
    console.print(rank_table(llm.capacity, len(sequence), owned, selected.tolist()))
    console.print(selection_table(report))
    console.print(exchange_table(report.bytes_exchanged))

    table = Table(title=f"{llm.config.model_type}: greedy tokens after {len(prompt)} prompt tokens")
    table.add_column("run")
    table.add_column("tokens")
    for name, tokens in runs.items():
        table.add_row(name, " ".join(map(str, tokens)))
    console.print(table)
    agree = all(tokens == expected for tokens in runs.values())
    if agree:
        names = ", ".join(runs)
        console.print(f"[bold green]All {len(expected)} tokens agree: {names}.[/]")
    else:
        console.print("[bold red]Tokens differ: this installation computes something else.[/]")
    return agree
