"""Prompts that hide a number in long text and ask for it: pure functions of a seed.

A trial is a length, a depth, a number of keys and a number of its own; `document_of` makes its
text, the same for ever. One key:

    ... The pass key is 71432. Remember it. 71432 is the pass key. ...
    What is the pass key? The pass key is

Several keys, each with a name, of which one is asked for (the others distract):

    ... The pass key of erin is 60214. ... The pass key of tom is 18873. ...
    What is the pass key of erin? The pass key of erin is

Every second trial with one key, and each with several, has other numbers strewn in; the rest of the
text has no digits at all.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import product

import numpy as np

MOST_KEYS = 8
NAMES = (
    *("erin", "tom", "matilda", "igor", "noor", "pablo", "sigrid", "walter", "judith", "omar"),
    *("fiona", "kenji", "lucia", "bram", "agnes", "dmitri"),
)
_KEY = "The pass key is {digits}. Remember it. {digits} is the pass key."
_QUESTION = "\nWhat is the pass key? The pass key is "
_NAMED_KEY = "The pass key of {name} is {digits}."
_NAMED_QUESTION = "\nWhat is the pass key of {name}? The pass key of {name} is "
_DISTRACTORS = (
    "The parcel weighed {digits} grams.",
    "Chapter {digits} is missing.",
    "They counted {digits} sheep that year.",
    "The number over the door was {digits}.",
)


@dataclass(frozen=True)
class Trial:
    """One prompt to make.

    Attributes:
        length: tokens of the prompt, at most; it falls short by less than a word.
        depth: of the key that is asked for, from 0 (the beginning) to 1.
        keys: how many keys; with more than one they have names.
        number: which of the trials of this length, depth and number of keys.
        seed: of all of them.
    """

    length: int
    depth: float
    keys: int = 1
    number: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Document:
    """A prompt and its answer.

    Attributes:
        text: the prompt.
        digits: the key that is asked for.
        places: where `text` has it, as (first character, one after the last).
        distractors: other numbers in the text, keys of other names included.
    """

    text: str
    digits: str
    places: tuple[tuple[int, int], ...]
    distractors: tuple[str, ...]


def trials_of(
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    keys: Sequence[int] = (1,),
    seed: int = 0,
) -> list[Trial]:
    """`trials` trials for every number of keys, length and depth.

    Raises:
        ValueError: a depth outside 0..1, a number of keys that is not 1..8, or no trial.
    """
    if not (lengths and depths and keys and trials >= 1):
        raise ValueError("no trial: give a length, a depth, a number of keys and 1 trial or more.")
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong:
        raise ValueError(f"depth {wrong[0]} lies outside the text: give 0 (its beginning) to 1.")
    wrong = [number for number in keys if not 1 <= number <= MOST_KEYS]
    if wrong:
        raise ValueError(f"{wrong[0]} needles are not tried: give 1 to {MOST_KEYS}.")
    cells = product(dict.fromkeys(keys), dict.fromkeys(lengths), dict.fromkeys(depths))
    return [Trial(s, d, k, number, seed) for k, s, d in cells for number in range(trials)]


def document_of(trial: Trial, size: Callable[[str], int]) -> Document:
    """The text of a trial: as much filler as keeps the prompt within its length.

    Args:
        trial: what to make.
        size: tokens of a text, as the model reads it.

    Raises:
        ValueError: keys and question alone are longer than the prompt may be.
    """
    rng = np.random.default_rng(
        [trial.seed, trial.length, round(trial.depth * 1e6), trial.keys, trial.number]
    )
    spread = min(6, 2 + trial.length // 2000)
    distract = trial.keys > 1 or trial.number % 2 == 0
    numbers = _numbers(rng, trial.keys + (spread if distract else 0))
    names = rng.permutation(NAMES)[: trial.keys].tolist()
    form, question = (_NAMED_KEY, _NAMED_QUESTION) if trial.keys > 1 else (_KEY, _QUESTION)
    inserts = [
        form.format(name=name, digits=digits) for name, digits in zip(names, numbers, strict=False)
    ]
    inserts += [
        str(rng.choice(_DISTRACTORS)).format(digits=digits) for digits in numbers[trial.keys :]
    ]
    depths = [trial.depth, *rng.random(len(inserts) - 1).tolist()]
    words = _filler(rng, trial.length)
    ending = question.format(name=names[0])

    def text_with(filler: int) -> str:
        pieces = [*words[:filler]]
        order = sorted(range(len(inserts)), key=lambda i: (depths[i], i), reverse=True)
        for i in order:  # from the end, so that the places before stay what they are
            pieces.insert(round(depths[i] * filler), inserts[i])
        return " ".join(pieces) + ending

    if size(text_with(0)) > trial.length:
        raise ValueError(
            f"a prompt of {trial.length} tokens has no room for {trial.keys} keys, other numbers "
            f"and a question: give a length of at least {2 * size(text_with(0))}."
        )
    fits, too_many = 0, len(words) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if size(text_with(middle)) <= trial.length:
            fits = middle
        else:
            too_many = middle
    text = text_with(fits)
    places = tuple(match.span() for match in re.finditer(numbers[0], text))
    return Document(text, numbers[0], places, tuple(numbers[1:]))


def answered(text: str) -> str | None:
    """The number that an answer begins with; None if it begins with anything else."""
    match = re.match(r"\s*(\d+)", text)
    return match and match[1]


def _numbers(rng: np.random.Generator, many: int) -> list[str]:
    """Distinct numbers of five digits."""
    return [str(n) for n in 10_000 + rng.choice(90_000, many, replace=False)]


@cache
def _sentences() -> tuple[str, ...]:
    """What filler is made of: see haystack/LICENCE.txt."""
    folder = resources.files("dcp_jax.bench") / "haystack"
    return tuple((folder / "village.txt").read_text(encoding="utf-8").split("\n")[:-1])


def _filler(rng: np.random.Generator, words: int) -> list[str]:
    """So many words of the sentences in an order of its own, a new one each time round."""
    found: list[str] = []
    while len(found) < words:
        for sentence in rng.permutation(_sentences()):
            found += str(sentence).split(" ")
    return found[:words]
