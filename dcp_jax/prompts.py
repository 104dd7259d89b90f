"""What a prompt may be, and its token ids, checked before anything runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dcp_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Prompts as a list; one prompt (a text, ids, a dict) becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r} is no prompt: give a text, token ids, or a list.")
    listed = list(prompts)
    array = getattr(prompts, "ndim", None) == 1
    ids = listed and all(isinstance(p, int | np.integer) for p in listed)
    return [prompts if array else listed] if ids or array else listed


def text_of(prompt: Prompt) -> str | None:
    """The prompt's text if it was given as text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def token_ids(prompt: Prompt, name: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids of a prompt.

    Args:
        prompt: a text, ids, {"prompt": text} or {"prompt_token_ids": ids}.
        name: what messages call it.
        tokenizer: for text; None refuses text.
        vocab_size: ids must lie below it.

    Raises:
        ValueError: text without a tokenizer, no token, or an id outside the vocabulary.
    """
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not set(prompt) <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                f'{name} has the keys {sorted(prompt)}: give either "prompt" or "prompt_token_ids".'
            )
        (prompt,) = prompt.values()
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"{name} is text, but the checkpoint has no tokenizer.json: give token ids."
            )
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable):
        raise ValueError(f"{name} is {prompt!r}: give a text or a list of token ids.")
    ids = np.asarray(prompt).tolist() if hasattr(prompt, "__array__") else list(prompt)
    if not ids:
        raise ValueError(f"{name} is empty: give at least one token.")
    wrong = [i for i in ids if not _is_id(i, vocab_size)]
    if wrong:
        raise ValueError(
            f"{name} has token ids outside the vocabulary: {wrong[:5]!r}; ids are whole numbers "
            f"from 0 to {vocab_size - 1}."
        )
    return [int(i) for i in ids]


def check_fits(ids: list[int], name: str, max_model_len: int, *, generate: int) -> None:
    """Refuse a prompt that leaves no room for `generate` tokens in the context."""
    if len(ids) + generate > max_model_len:
        asked = f" and {generate} to generate" if generate else ""
        raise ValueError(
            f"{name} has {len(ids)} tokens{asked}, but max_model_len is {max_model_len}: shorten "
            "it or raise max_model_len."
        )


def _is_id(value: Any, vocab_size: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and 0 <= int(value) < vocab_size
