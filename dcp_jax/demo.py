"""The demonstration: numbers hidden in long texts, found by ranks that share the caches."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dcp_jax.bench.passkey import longest, prompts_of, retrieve, text_model
from dcp_jax.bench.passkey_trials import trials_of
from dcp_jax.dcp.layout import local_length, owner
from dcp_jax.devices import ensure_devices
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.llm import LLM
from dcp_jax.policy import PrefillPolicy
from dcp_jax.tables import rank_table

TOKENS, CONTINUED = 4096, 64
DEPTHS = (0.9, 0.5, 0.1)
OPENING = "The road to the sea was long, and"
_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}


def run(
    model: str | Path, dcp_size: int, console: Console, *, tokens: int = TOKENS, seed: int = 0
) -> bool:
    """Hide passkeys, ask for them, show where one was found, continue a text; were all found?

    Args:
        model: a checkpoint with a tokenizer, or the name of a model in the box.
        dcp_size: ranks.
        console: where to print.
        tokens: length of each text.
        seed: of texts and numbers.

    Raises:
        ValueError: no tokenizer, or a text longer than the model's context.
    """
    directory, config, tokenizer = text_model(model)
    trials = trials_of([tokens], DEPTHS, 1, seed=seed)
    prompts = prompts_of(trials, tokenizer, config, progress=False)
    document, ids = prompts[-1].document, list(prompts[-1].token_ids)
    (start, end), *_ = document.places
    console.print(
        f"{len(trials)} texts of {tokens:,} tokens over {dcp_size} ranks, each of which caches "
        f"{tokens // dcp_size:,} of them; a pass key is hidden in each:"
    )
    console.print(f"... {document.text[start - 60 : end + 60]} ...", style="dim", **_PLAIN)
    console.print(f"... {document.text[-80:]}", style="dim", **_PLAIN)
    ensure_devices(dcp_size)
    console.print("loading, compiling, reading ...")
    llm = LLM(
        directory,
        tp=dcp_size,
        dcp_size=dcp_size,
        page_size=16,
        max_model_len=max(longest(prompts), CONTINUED + len(OPENING) + 1),
        max_running_requests=1,
        # Ranks share one processor here: work done once is better than work done on each.
        prefill_policy=PrefillPolicy(split_indexer_min_kv=0),
    )
    outcomes = list(retrieve(llm, prompts, batch=1))
    for outcome in outcomes:
        asked, said = outcome.prompt, "found" if outcome.hit else "NOT found"
        answer = f"answer {outcome.text!r}, hidden {asked.document.digits}: {said}"
        console.print(f"key at {asked.trial.depth:.0%} of the text: {answer}", **_PLAIN)
    _where(llm, ids, _token_places(tokenizer, document.text, start, end), console)

    console.print("\nand a short continuation:", style="bold")
    console.print(OPENING, end="", **_PLAIN)
    params = SamplingParams(temperature=0.0, max_tokens=CONTINUED)
    for piece in llm.stream(OPENING, params):
        console.print(piece.text, end="", soft_wrap=True, **_PLAIN)
    console.print()
    return all(outcome.hit for outcome in outcomes)


def _token_places(tokenizer, text: str, start: int, end: int) -> range:
    """Positions of the tokens of `text[start:end]`."""
    return range(len(tokenizer.encode(text[:start])), len(tokenizer.encode(text[:end])))


def _where(llm: LLM, ids: list[int], needle: range, console: Console) -> None:
    """Who holds the text and the number, and in which layers the last token selects the number."""
    ranks = llm.capacity.ranks
    report = llm.explain(ids)
    owned = [local_length(len(ids), rank, ranks) for rank in range(ranks)]
    selected = np.sum([counts[:, -1] for counts in report.owned_counts.values()], axis=0)
    console.print(rank_table(llm.capacity, len(ids), owned, selected.tolist()))
    table = Table(title=f"digits of the key (positions {needle.start} to {needle.stop - 1})")
    table.add_column("position", justify="right")
    table.add_column("owner", justify="right")
    table.add_column("selected by the last token in layers")
    for position in needle:
        layers = [str(k) for k, chosen in report.topk_indices.items() if position in chosen[-1]]
        table.add_row(str(position), f"rank {owner(position, ranks)}", ", ".join(layers) or "none")
    console.print(table)
