"""Stop strings: never shown, never missed, whatever pieces the text arrives in."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_jax.engine.stop import StopMatcher
from dcp_jax.tokenizer import ByteTokenizer, IncrementalDetokenizer


@dataclass(frozen=True)
class Case:
    id: str
    stop: tuple[str, ...]
    pieces: tuple[str, ...]
    shown: tuple[str, ...]  # after each piece, and at the end
    matched: str | None = None
    include: bool = False


CASES = [
    Case("no stop strings", (), ("ab", "c"), ("ab", "c", "")),
    Case("inside a piece", ("STOP",), ("ab STOP cd",), ("ab ", ""), "STOP"),
    Case("alone in a piece", ("b",), ("a", "b", "c"), ("a", "", "", ""), "b"),
    Case("over pieces", ("STOP",), ("aS", "TO", "Pb"), ("a", "", "", ""), "STOP"),
    Case("withheld in vain", ("STOP",), ("aST", "ART"), ("a", "START", "")),
    Case("withheld at the end", ("STOP",), ("aST",), ("a", "ST")),
    Case("withheld anew", ("aab",), ("aa", "a", "ab"), ("", "a", "a", ""), "aab"),
    Case("a second beginning", ("abac",), ("aba", "bac"), ("", "ab", ""), "abac"),
    Case("at the beginning", ("ab",), ("abc",), ("", ""), "ab"),
    Case("ends first", ("abc", "b"), ("xabc",), ("xa", ""), "b"),
    Case("ends first, over pieces", ("abc", "b"), ("xa", "b", "c"), ("x", "a", "", ""), "b"),
    Case("starts first", ("bc", "abc"), ("xabc",), ("x", ""), "abc"),
    Case("the first of two", ("b", "c"), ("acb",), ("a", ""), "c"),
    Case("empty pieces", ("ab",), ("", "a", "", "b"), ("", "", "", "", ""), "ab"),
    Case("shown when asked", ("STOP",), ("aST", "OPb"), ("a", "STOP", ""), "STOP", True),
    Case(
        "a stop string of two characters, the first shown once",
        ("é\n",),
        ("aé", "é\n"),
        ("a", "é", ""),
        "é\n",
    ),
]


def run(matcher: StopMatcher, pieces: Iterable[str]) -> list[str]:
    return [*(matcher.add(piece) for piece in pieces), matcher.flush()]


def oracle(stop: list[str], text: str) -> tuple[str, str | None]:
    """Text before the match that ends first, and that match, by looking at every end in turn."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_cases(case: Case):
    matcher = StopMatcher(list(case.stop), case.include)
    assert run(matcher, case.pieces) == list(case.shown)
    assert matcher.matched == case.matched


LETTERS = st.text("abc", min_size=1, max_size=5)
STOPS = st.lists(LETTERS, max_size=4)
PIECES = st.lists(st.text("abc", max_size=6), max_size=12)


@given(stop=STOPS, pieces=PIECES)
def test_pieces_do_not_matter(stop: list[str], pieces: list[str]):
    text = "".join(pieces)
    before, matched = oracle(stop, text)
    for include in (False, True):
        for split in (pieces, [text], list(text)):
            matcher = StopMatcher(stop, include)
            shown = "".join(run(matcher, split))
            assert matcher.matched == matched
            assert shown == before + (matched if include and matched else "")


@given(stop=STOPS, pieces=PIECES)
def test_what_is_shown_is_never_taken_back_nor_held_too_long(stop: list[str], pieces: list[str]):
    matcher, text, shown = StopMatcher(stop), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.add(piece)
        if matcher.matched is None:
            held = text[len(shown) :]
            assert text.startswith(shown)
            assert not held or any(s.startswith(held) and s != held for s in stop)


@given(
    stop=st.lists(st.text("é中😀a", min_size=1, max_size=3), min_size=1, max_size=3),
    text=st.text("é中😀a", max_size=20),
)
def test_through_split_characters(stop: list[str], text: str):
    """Each token is one byte, so that every character comes in parts."""
    tokenizer = ByteTokenizer()
    stream = IncrementalDetokenizer(tokenizer)
    matcher = StopMatcher(stop)
    shown = [matcher.add(stream.add(token)) for token in tokenizer.encode(text)]
    shown += [matcher.add(stream.flush()), matcher.flush()]
    assert ("".join(shown), matcher.matched) == oracle(stop, text)


def test_one_string_is_one_stop_string():
    assert run(StopMatcher("ab"), ["xaab"]) == ["xa", ""]


@pytest.mark.parametrize("stop", [["a", ""], [3], ""])
def test_refused(stop):
    with pytest.raises(ValueError, match=r"stop=\[.*end no text: give strings of at least one"):
        StopMatcher(stop)


def test_a_stop_string_may_begin_before_stopping_is_allowed():
    """min_tokens: a match that ends too early does not count, one across the border does."""
    matcher = StopMatcher(["cde", "ab"])
    shown = [matcher.add(c, may_stop=i >= 3) for i, c in enumerate("abcdefgh")]
    assert ("".join(shown), matcher.matched) == ("ab", "cde")
