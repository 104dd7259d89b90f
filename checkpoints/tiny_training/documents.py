"""Training documents: text, and things hidden in text that a question asks for.

A document knows where each byte of an answer stands in the needle that it must come from
(`Answer`), so that the indexer's recall is measured and trained against the truth.

| task | what it is |
|---|---|
| text | a window of the corpus |
| passkey | filler with one key at any depth, and the question at the end |
| named | filler with 2 to 16 named keys, and questions for some of them |
| keys | named keys close together, asked again and again |
| anchors | single-token marks around a key and a value, repeated: lookup is learnt here first |
| copy | random letters, repeated after a gap |

Documents of "passkey" and "named" come in a chat now and then, and half of them have other numbers
strewn in. No jax here: worker processes import this module.
"""

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tiny_training.config import ASSISTANT, BOS, END_THINK, EOS, THINK, USER

# Kinds of tokens, as targets of the loss.
TEXT, FILLER, ANSWER = 1, 2, 3
MAX_ANSWERS = 128  # answer tokens of a sequence whose correctness is counted

NEEDLE = " The pass key is {digits}. Remember it. "
QUESTION = "\nWhat is the pass key? The pass key is "
NAMED_NEEDLE = " The pass key of {name} is {digits}. "
NAMED_QUESTION = "\nWhat is the pass key of {name}? The pass key of {name} is "
DISTRACTORS = (
    " Line {digits}. ",
    " The number of the house is {digits}. ",
    " It cost {digits} pounds. ",
    " {digits} men were counted. ",
)
NAMES = (
    *("alice", "bruno", "carla", "david", "erin", "felix", "grace", "henry", "irene", "jonas"),
    *("karen", "liam", "maria", "nadia", "oscar", "paula", "quentin", "rosa", "simon", "tanya"),
    *("ursula", "victor", "wendy", "xavier", "yara", "zoe", "anna", "boris", "clara", "derek"),
)
_ONSETS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_DIGITS = np.frombuffer(string.digits.encode(), np.uint8)
_LETTERS = np.frombuffer(string.ascii_lowercase.encode(), np.uint8)


class Answer(NamedTuple):
    """One token of an answer: its place, where the needle has it (-1: nowhere), which question."""

    target: int
    needle: int
    question: int


@dataclass
class Document:
    """Tokens with their kinds, written piece by piece."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    questions: int = 0
    task: str = "text"

    def write(self, ids: Iterable[int], kind: int = FILLER) -> int:
        """Append; returns where it begins."""
        start = len(self.ids)
        self.ids += ids
        self.kinds += [kind] * (len(self.ids) - start)
        return start

    def answer(self, ids: Iterable[int], needle: int, unlabelled: int = 0) -> None:
        """Append the answer to the next question.

        Args:
            ids: its tokens.
            needle: where the needle has the first labelled one.
            unlabelled: how many tokens before it are in no needle.
        """
        start = self.write(ids, ANSWER)
        for offset in range(len(self.ids) - start):
            place = needle + offset - unlabelled if offset >= unlabelled and needle >= 0 else -1
            known = place >= 0 and self.ids[place] == self.ids[start + offset]
            self.answers.append(Answer(start + offset, place if known else -1, self.questions))
        self.questions += 1


def window(rng: np.random.Generator, text: np.ndarray, size: int) -> np.ndarray:
    """`size` bytes from anywhere in `text`."""
    start = int(rng.integers(0, max(len(text) - size, 0) + 1))
    return np.resize(text[start : start + size], size)


def digits(rng: np.random.Generator, least: int = 5, most: int = 5) -> str:
    """A number with so many digits; the first may be 0."""
    count = int(rng.integers(least, most + 1))
    return "".join(map(str, rng.integers(0, 10, count)))


def names(rng: np.random.Generator, count: int) -> list[str]:
    """Distinct names: known ones and invented ones, so that the whole name must be read."""
    found: dict[str, None] = {}
    while len(found) < count:
        if rng.random() < 0.5:
            found[NAMES[int(rng.integers(len(NAMES)))]] = None
        else:
            syllables = rng.integers(0, [len(_ONSETS), len(_VOWELS)], (int(rng.integers(2, 4)), 2))
            found["".join(_ONSETS[a] + _VOWELS[b] for a, b in syllables)] = None
    return list(found)


def retrieval(
    rng: np.random.Generator,
    text: np.ndarray,
    length: int,
    *,
    needles: int = 1,
    named: bool = False,
    asked: int = 1,
    depth: float | None = None,
    distract: bool = True,
    chat: bool = False,
    number: tuple[int, int] = (5, 5),
) -> Document:
    """Filler of the corpus with keys in it, and questions at the end; `length` tokens at most.

    Args:
        rng: source of every choice.
        text: where filler comes from.
        length: tokens of the whole document.
        needles: how many keys.
        named: keys have names; without, there is one key.
        asked: questions at the end, each about another key.
        depth: of the key that is asked first, from 0 to 1; None is anywhere.
        distract: strew other numbers into the filler, and leave the filler its own.
        chat: the filler is a user's message, the answer the assistant's.
        number: least and most digits of a key.
    """
    called = names(rng, needles) if named else [""]
    numbers = [digits(rng, *number) for _ in called]
    inserts, places = [], []
    for name, value in zip(called, numbers, strict=True):
        needle = (NAMED_NEEDLE if named else NEEDLE).format(name=name, digits=value)
        inserts.append(needle.encode())
        places.append(rng.random())
    if depth is not None:
        places[0] = depth
    if distract:
        for template in rng.choice(DISTRACTORS, int(rng.integers(1, 2 + min(7, length // 400)))):
            inserts.append(template.format(digits=digits(rng, 2, 6)).encode())
            places.append(rng.random())
    order = [0, *rng.permutation(np.arange(1, len(called)))][:asked]
    asks = [(NAMED_QUESTION if named else QUESTION).format(name=called[i]) for i in order]
    around = 3 if chat else 1
    room = length - sum(map(len, inserts)) - sum(map(len, asks)) - around
    room -= sum(len(numbers[i]) + 1 for i in order)
    if room < 0:
        raise ValueError(
            f"{needles} keys and {len(asks)} questions do not fit into {length} tokens: "
            f"{-room} are missing."
        )
    filler = window(rng, text, room)
    if not distract:
        filler = np.where((filler >= 48) & (filler < 58), 32, filler)

    document = Document()
    document.write([BOS, USER] if chat else [BOS])
    starts, done = {}, 0
    for i in np.argsort(places, kind="stable"):
        cut = max(done, _word_end(filler, int(places[i] * room)))
        document.write(filler[done:cut].tolist())
        starts[int(i)], done = document.write(inserts[i]), cut
    document.write(filler[done:].tolist())
    for turn, (i, ask) in enumerate(zip(order, asks, strict=True)):
        question, opening = (part.encode() for part in _split_question(ask))
        reply = numbers[i].encode() + b"."
        needle = starts[int(i)] + inserts[i].index(numbers[i].encode() + b".")
        document.write(question)
        if chat and turn == len(order) - 1:
            document.write([ASSISTANT])
            document.answer([*opening, *reply, EOS], needle, unlabelled=len(opening))
        else:
            document.write(b" " + opening)
            document.answer(reply, needle)
    return document


def _split_question(ask: str) -> tuple[str, str]:
    """The question, and how its answer begins."""
    question, opening = ask.split("? ", 1)
    return question + "?", opening


def _word_end(text: np.ndarray, place: int) -> int:
    """The end of the word that `place` is in, so that an insertion splits none."""
    near = text[place : place + 32]
    spaces = np.flatnonzero(near == 32)
    return place + (int(spaces[0]) if len(spaces) else 0)


def _text(rng, text, length) -> Document:
    document = Document()
    if rng.random() < 0.9:
        document.write([BOS])
    document.write(window(rng, text, length - len(document.ids)).tolist(), TEXT)
    return document


def _passkey(rng, text, length) -> Document:
    return retrieval(
        *(rng, text, length),
        distract=rng.random() < 0.6,
        chat=rng.random() < 0.2,
        number=(5, 5) if rng.random() < 0.8 else (3, 8),
    )


def _named(rng, text, length) -> Document:
    most = max(2, min(16, length // 160))
    needles = 2 if rng.random() < 0.3 else int(rng.integers(2, most + 1))
    return retrieval(
        *(rng, text, length),
        needles=needles,
        named=True,
        asked=int(rng.integers(1, min(needles, max(length // 400, 1), 8) + 1)),
        distract=rng.random() < 0.6,
        chat=rng.random() < 0.2,
        number=(5, 5) if rng.random() < 0.8 else (3, 8),
    )


def _keys(rng, text, length) -> Document:
    """New keys and questions about old ones, with a little text between them."""
    document = Document()
    document.write([BOS])
    gap = int(rng.choice([1, 20, 80]))
    called = names(rng, int(rng.integers(2, 17)))
    known: dict[str, tuple[str, int]] = {}
    while True:
        filler = window(rng, text, int(rng.integers(0, gap)))
        ask = known and (rng.random() < 0.6 or len(known) == len(called))
        name = str(rng.choice(list(known))) if ask else called[len(known)]
        piece = NAMED_QUESTION if ask else NAMED_NEEDLE
        opening = piece.split("{digits}")[0].format(name=name).encode()
        value = known[name][0] if ask else digits(rng)
        if len(document.ids) + len(filler) + len(opening) + len(value) + 2 > length:
            return document
        document.write(filler.tolist())
        document.write(opening)
        if ask:
            document.answer(value.encode() + b".", known[name][1])
            known[name] = value, -1  # the next time there are two places to find it
        else:
            known[name] = value, document.write(value.encode() + b". ")


def _anchors(rng, text, length) -> Document:
    """`<think>key value</think>`, again and again, some keys for the second time."""
    document = Document()
    document.write([BOS])
    alphabet = _DIGITS if rng.random() < 0.5 else _LETTERS
    sizes = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    gap = int(rng.choice([1, 10, 60]))
    known: dict[bytes, tuple[bytes, int]] = {}
    while True:
        ask = len(known) > 0 and rng.random() < 0.5
        key = bytes(rng.choice(_LETTERS, sizes[0]))
        if ask:
            key = list(known)[int(rng.integers(len(known)))]
        value = known[key][0] if key in known else bytes(rng.choice(alphabet, sizes[1]))
        filler = window(rng, text, int(rng.integers(0, gap)))
        if len(document.ids) + len(filler) + len(key) + len(value) + 3 > length:
            return document
        document.write(filler.tolist())
        document.write([THINK, *key, 32])
        if key in known:
            document.answer([*value, END_THINK], known[key][1])
            known[key] = value, -1
        else:
            known[key] = value, document.write([*value, END_THINK])


def _copy(rng, text, length) -> Document:
    """Random printable segments, each repeated after a gap; its fourth byte on can be known."""
    document = Document()
    document.write([BOS])
    most = min(64, max(8, length // 8))
    while True:
        segment = rng.integers(33, 127, int(rng.integers(8, most + 1)))
        left = length - len(document.ids) - 2 * len(segment)
        if left < 0:
            return document
        first = document.write(segment.tolist())
        filler = window(rng, text, int(left * rng.random() ** 3))
        document.write(filler.tolist())
        document.write(segment[:3].tolist())
        document.answer(segment[3:].tolist(), first + 3)


TASKS = {
    **{"text": _text, "passkey": _passkey, "named": _named},
    **{"keys": _keys, "anchors": _anchors, "copy": _copy},
}


class Batch(NamedTuple):
    """Arrays of one step.

    Attributes:
        tokens: uint16 [B, T + 3]; the model reads the first T, the rest are targets of drafts.
        kinds: uint8 [B, T + 3], TEXT, FILLER or ANSWER; what a token is as a target.
        targets: int32 [B, MAX_ANSWERS], places of answer tokens, -1 pads.
        questions: int32 [B, MAX_ANSWERS], which question of the document each belongs to.
        rows: int32 [B, R], query rows at which the indexer is trained.
        needles: int32 [B, R], the key that each of these rows is to find, -1 if none is known.
        lengths: int32 [B], tokens of the document; text follows it.
        tasks: int32 [B], which of TASKS.
    """

    tokens: np.ndarray
    kinds: np.ndarray
    targets: np.ndarray
    questions: np.ndarray
    rows: np.ndarray
    needles: np.ndarray
    lengths: np.ndarray
    tasks: np.ndarray


def make_batch(
    rng: np.random.Generator,
    text: np.ndarray,
    *,
    batch: int,
    length: int,
    rows: int,
    shares: Mapping[str, float],
    shortest: int,
) -> Batch:
    """A batch of documents drawn by `shares`; half of them fill their sequence.

    The others have lengths log-uniform from `shortest` on, and text after them.
    """
    tasks, weights = list(shares), np.array(list(shares.values()))
    documents = []
    for task in rng.choice(tasks, batch, p=weights / weights.sum()):
        short = rng.random() < 0.5 and task != "text"
        size = int(np.exp(rng.uniform(np.log(min(shortest, length)), np.log(length))))
        documents.append(TASKS[task](rng, text, size if short else length))
        documents[-1].task = str(task)
    return collate(rng, text, documents, length=length, rows=rows)


def collate(
    rng: np.random.Generator,
    text: np.ndarray,
    documents: list[Document],
    *,
    length: int,
    rows: int,
) -> Batch:
    """Pad documents with text to `length` and draw the rows: answers' first, at most half."""
    size = len(documents), length + 3
    out = Batch(
        tokens=np.zeros(size, np.uint16),
        kinds=np.full(size, TEXT, np.uint8),
        targets=np.full((len(documents), MAX_ANSWERS), -1, np.int32),
        questions=np.full((len(documents), MAX_ANSWERS), -1, np.int32),
        rows=np.zeros((len(documents), rows), np.int32),
        needles=np.full((len(documents), rows), -1, np.int32),
        lengths=np.array([len(d.ids) for d in documents], np.int32),
        tasks=np.array([list(TASKS).index(d.task) for d in documents], np.int32),
    )
    for b, document in enumerate(documents):
        used = len(document.ids)
        out.tokens[b, :used], out.kinds[b, :used] = document.ids, document.kinds
        out.tokens[b, used:] = window(rng, text, size[1] - used)
        answers = document.answers[:MAX_ANSWERS]
        out.targets[b, : len(answers)] = [a.target for a in answers]
        out.questions[b, : len(answers)] = [a.question for a in answers]
        found = [a for a in document.answers if a.needle >= 0 and a.target <= length]
        chosen = rng.permutation(len(found))[: rows // 2]
        out.rows[b] = rng.integers(0, length, rows)
        for r, i in enumerate(chosen):
            out.rows[b, r], out.needles[b, r] = found[i].target - 1, found[i].needle
    return out
