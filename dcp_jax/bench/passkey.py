"""Passkey retrieval on an `LLM`: hits by length and depth, and what every miss said."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm.auto import tqdm

from dcp_jax.bench.passkey_trials import Document, Trial, answered, document_of
from dcp_jax.config import ModelConfig
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.llm import LLM
from dcp_jax.named import find_model
from dcp_jax.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Prompt:
    """A trial as the model reads it.

    Attributes:
        trial: which one.
        document: its text and answer.
        token_ids: the text's tokens.
        answer_tokens: tokens of the digits and the full stop after them.
    """

    trial: Trial
    document: Document
    token_ids: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What the model said.

    Attributes:
        prompt: what it was asked.
        text: its greedy answer.
        token_ids: tokens of it.
    """

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]

    @property
    def hit(self) -> bool:
        """Whether the answer begins with the digits that were hidden, and no other follows."""
        return answered(self.text) == self.prompt.document.digits

    def record(self) -> dict[str, Any]:
        """The trial, the digits and the answer, for JSON."""
        digits = self.prompt.document.digits
        return {**asdict(self.prompt.trial), "digits": digits, "answer": self.text}


def text_model(model: str | Path) -> tuple[Path, ModelConfig, Tokenizer]:
    """A checkpoint that reads text; no weights are read.

    Raises:
        ValueError: it has no tokenizer, or it is no checkpoint.
    """
    directory = find_model(model)
    config, tokenizer = ModelConfig.from_hf(directory), load_tokenizer(directory)
    if tokenizer is None:
        raise ValueError(
            f"{model} has no tokenizer.json, and a passkey is hidden in text: add the checkpoint's "
            "tokenizer files, or try tiny-dsa."
        )
    return directory, config, tokenizer


def prompts_of(
    trials: Sequence[Trial], tokenizer: Tokenizer, config: ModelConfig, *, progress: bool = True
) -> list[Prompt]:
    """The trials as tokens; with `progress`, a bar if it takes long.

    Raises:
        ValueError: a prompt with its answer is longer than the model allows, or too short for its
            keys.
    """
    prompts = []
    for trial in tqdm(trials, desc="prompts", delay=2, disable=not progress):
        document = document_of(trial, lambda text: len(tokenizer.encode(text)))
        answer = len(tokenizer.encode(document.digits + ".", add_special_tokens=False))
        if trial.length + answer > config.max_position_embeddings:
            raise ValueError(
                f"a prompt of {trial.length} tokens and its answer exceed the model's "
                f"max_position_embeddings={config.max_position_embeddings}: give lengths of at "
                f"most {config.max_position_embeddings - answer}."
            )
        ids = tuple(tokenizer.encode(document.text))
        prompts.append(Prompt(trial, document, ids, answer))
    return prompts


def longest(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt and its answer: the `max_model_len` that the run needs."""
    return max(prompt.trial.length + prompt.answer_tokens for prompt in prompts)


def retrieve(
    llm: LLM, prompts: Sequence[Prompt], *, batch: int, name: str = "passkey", progress: bool = True
) -> Iterator[Outcome]:
    """Ask for every key, greedily.

    Args:
        llm: the model.
        prompts: what to ask.
        batch: prompts given to the engine at a time.
        name: of the progress bar.
        progress: show a bar of prompts, with the hits so far.
    """
    hits = 0
    with tqdm(total=len(prompts), desc=name, unit="prompt", disable=not progress) as bar:
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            params = [SamplingParams(temperature=0.0, max_tokens=p.answer_tokens) for p in part]
            ids = [list(p.token_ids) for p in part]
            for prompt, output in zip(part, llm.generate(ids, params, use_tqdm=False), strict=True):
                said = output.outputs[0]
                outcome = Outcome(prompt, said.text, tuple(said.token_ids))
                hits += outcome.hit
                yield outcome
            bar.update(len(part))
            bar.set_postfix_str(f"{hits} hits")


@dataclass(frozen=True)
class Cell:
    """Hits among the trials of one number of keys, length and depth."""

    keys: int
    length: int
    depth: float
    trials: int
    hits: int


def cells_of(outcomes: Iterable[Outcome]) -> list[Cell]:
    """The outcomes counted, in the order of keys, length and depth."""

    def cell(outcome: Outcome) -> tuple[int, int, float]:
        trial = outcome.prompt.trial
        return trial.keys, trial.length, trial.depth

    return [
        Cell(*place, trials=len(hits), hits=sum(hits))
        for place, group in groupby(sorted(outcomes, key=cell), cell)
        if (hits := [outcome.hit for outcome in group])
    ]


def hit_tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """One table per number of keys: lengths down, depths across."""
    for keys, group in groupby(cells, lambda cell: cell.keys):
        of = {(cell.length, cell.depth): cell for cell in group}
        depths = sorted({depth for _, depth in of})
        title = "passkeys found" if keys == 1 else f"passkeys found, one of {keys} named"
        table = Table(title=title)
        table.add_column("length", justify="right")
        for depth in depths:
            table.add_column(f"depth {depth:g}", justify="right")
        table.add_column("all", justify="right")
        for length in sorted({length for length, _ in of}):
            row = [of[length, depth] for depth in depths]
            hits, trials = sum(c.hits for c in row), sum(c.trials for c in row)
            table.add_row(
                f"{length:,}",
                *(f"{c.hits}/{c.trials}" for c in row),
                f"{hits / trials:.1%}",
            )
        yield table


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Cells and every miss, for JSON."""
    return {
        "hits": sum(outcome.hit for outcome in outcomes),
        "trials": len(outcomes),
        "cells": [asdict(cell) for cell in cells_of(outcomes)],
        "misses": [outcome.record() for outcome in outcomes if not outcome.hit],
    }
