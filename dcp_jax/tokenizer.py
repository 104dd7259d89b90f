"""Text to ids and back: `tokenizer.json`, the byte tokenizer, and text from ids as they come."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer as HfTokenizer

from dcp_jax.json_files import read_object

BYTE_TOKENIZER_CLASS = "ByteTokenizer"
BYTE_TOKENIZER_TOKENS = (
    *("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"),
    *("<think>", "</think>", "<tool_call>"),
)
_CONFIG_FILE = "tokenizer_config.json"
_BYTES = 256
_BROKEN = "\ufffd"  # stands for bytes that are no character
_LONGEST_CHARACTER = 4  # bytes, hence tokens, of one character in UTF-8


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens, which are no text: `decode` leaves them out unless asked."""
        ...

    @property
    def joins_bytes(self) -> bool:
        """Whether `decode` is UTF-8 of the joined `token_bytes`."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; the names of special tokens in it become those tokens.

        Args:
            text: what to encode.
            add_special_tokens: add what the checkpoint puts around a text (a BOS token, say): not
                for a rendered chat, which has it already.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no character become U+FFFD."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, or None if there is no such token."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token stands for, perhaps a part of a character; None for no token."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; the added tokens follow.

    An added token named `<|...|>` is a control token. The others (`<think>`) are text that `decode`
    shows, as in the released tokenizers: parsers of reasoning and of tool calls look for them.
    """

    joins_bytes = True

    def __init__(self, tokens: Sequence[str] = BYTE_TOKENIZER_TOKENS, *, bos: str | None = None):
        """Raises ValueError for tokens that are empty or repeated, or a `bos` not among them.

        Args:
            tokens: the added tokens in the order of their ids, which start at 256.
            bos: the added token that `encode` puts before a text, if any.
        """
        wrong = [t for t in tokens if not isinstance(t, str) or not t or tokens.count(t) > 1]
        if wrong:
            raise ValueError(
                f"the special tokens {wrong!r} are empty, repeated or not text: name each once."
            )
        self._names = tuple(tokens)
        self._ids = {token: _BYTES + number for number, token in enumerate(tokens)}
        if bos is not None and bos not in self._ids:
            raise ValueError(
                f"bos={bos!r} is not among the special tokens {list(tokens)}: add it there, or ask "
                "for no BOS token."
            )
        self._bos = [] if bos is None else [self._ids[bos]]
        self.special_token_ids = frozenset(
            i for token, i in self._ids.items() if re.fullmatch(r"<\|.*\|>", token)
        )
        longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(longest_first)})") if tokens else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ByteTokenizer":
        """Read a `tokenizer_config.json` whose tokenizer_class is ByteTokenizer.

        The added tokens are a list `special_tokens`, or Hugging Face's `added_tokens_decoder`
        (from an id to {"content": name}). `"add_bos_token": true` puts `bos_token` before a text.

        Raises:
            ValueError: it names no tokens, or ids that do not follow the bytes without a gap.
        """
        tokens = config.get("special_tokens")
        added = config.get("added_tokens_decoder")
        if isinstance(added, Mapping):
            by_id = {int(i): _name(token) for i, token in added.items()}
            tokens = [by_id[i] for i in sorted(by_id)]
            if sorted(by_id) != list(range(_BYTES, _BYTES + len(by_id))):
                raise ValueError(
                    f"{_CONFIG_FILE} gives the added tokens the ids {sorted(by_id)}: those of a "
                    f"{BYTE_TOKENIZER_CLASS} follow the bytes, from {_BYTES} on, without a gap."
                )
        if not isinstance(tokens, list):
            raise ValueError(
                f"{_CONFIG_FILE} of a {BYTE_TOKENIZER_CLASS} has special_tokens={tokens!r}: list "
                f'their names in the order of their ids, as in "special_tokens": '
                f"{json.dumps(BYTE_TOKENIZER_TOKENS)}."
            )
        tokens = [_name(token) for token in tokens]
        bos = _name(config.get("bos_token")) if config.get("add_bos_token") else None
        return cls(tokens, bos=bos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = list(self._bos) if add_special_tokens else []
        for part in self._splitter.split(text) if self._splitter else [text]:
            token = self._ids.get(part)
            ids += _utf8(part) if token is None else [token]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self.special_token_ids if skip_special_tokens else ()
        shown = (self.token_bytes(i) or b"" for i in ids if i not in hidden)
        return b"".join(shown).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def token_bytes(self, token_id: int) -> bytes | None:
        if 0 <= token_id < _BYTES:
            return bytes([token_id])
        number = token_id - _BYTES
        return self._names[number].encode() if 0 <= number < len(self._names) else None


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library."""

    def __init__(self, path: Path):
        """Raises ValueError if the file cannot be read as a tokenizer."""
        try:
            self._tokenizer = HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer ({error}): fetch it again.") from error
        # what a file was saved with for training would cut or fill prompts
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        decoder = self._tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        self._decoders = [d["type"] for d in state.get("decoders", [state]) if d]
        self.joins_bytes = "ByteLevel" in self._decoders and {*self._decoders} <= {
            "ByteLevel",
            "Fuse",
        }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _utf8(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if self.joins_bytes:
            # the library's rule: a token with any character outside the alphabet stands for itself
            known = all(character in _BYTE_OF for character in token)
            return bytes(_BYTE_OF[c] for c in token) if known else token.encode()
        if token_id in self._added_ids:
            return token.encode()
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        if byte and "ByteFallback" in self._decoders:
            return bytes.fromhex(byte[1])
        if {"Metaspace", "Replace"} & {*self._decoders}:
            return token.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


class IncrementalDetokenizer:
    """Text of generated ids as they come, each character once it is whole.

    The pieces of `add` and `flush`, joined, are what `decode` of the tail and the ids together has
    beyond the tail's own text: with no tail, `decode(ids)`. (A tokenizer with byte fallback decodes
    a malformed run of bytes as a whole: the characters at its beginning stay as they were shown.)
    A token costs the same however many came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ):
        """Starts after a prompt.

        Args:
            tokenizer: decodes the ids.
            prompt_tail: the prompt's ids, or the last 16 at least: a decoder may strip the space
                from the first word of a text, and a character may begin in the prompt.
            skip_special_tokens: leave control tokens out of the text.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        tail = list(self._visible(prompt_tail[-16:]))
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        # without joined bytes: ids already shown, for context; ids waiting; length of their text
        self._shown: list[int] = []
        self._waiting: list[int] = []
        self._shown_length = 0
        if tokenizer.joins_bytes:
            for token in tail[-_LONGEST_CHARACTER:]:
                self._bytes.decode(tokenizer.token_bytes(token) or b"")
        else:
            self._start_after(tail)

    def add(self, token_id: int) -> str:
        """The text that is certain with this token, perhaps none yet."""
        for token in self._visible([token_id]):
            if self._tokenizer.joins_bytes:
                return self._bytes.decode(self._tokenizer.token_bytes(token) or b"")
            self._waiting.append(token)
            text = self._decode(self._shown + self._waiting)
            if not text.endswith(_BROKEN) or len(self._waiting) >= _LONGEST_CHARACTER:
                return self._show(text)
        return ""

    def flush(self) -> str:
        """What is left at the end of the sequence: a broken character shows as U+FFFD."""
        if self._tokenizer.joins_bytes:
            return self._bytes.decode(b"", final=True)
        return self._show(self._decode(self._shown + self._waiting)) if self._waiting else ""

    def _visible(self, ids: Iterable[int]) -> Iterable[int]:
        """Without hidden tokens, and without ids that are no token (a model may have more)."""
        return (
            i for i in ids if i not in self._hidden and self._tokenizer.token_bytes(i) is not None
        )

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _show(self, text: str) -> str:
        """The text beyond what was shown; what waited is the context of what comes."""
        piece = text[self._shown_length :]
        self._shown, self._waiting = self._waiting, []
        self._shown_length = len(self._decode(self._shown))
        return piece

    def _start_after(self, tail: list[int]) -> None:
        """Take the prompt's end as shown, but for a character that it leaves unfinished."""
        for unfinished in range(min(_LONGEST_CHARACTER, len(tail) + 1)):
            cut = len(tail) - unfinished
            text = self._decode(tail[:cut])
            if not text.endswith(_BROKEN):
                self._shown, self._waiting = tail[:cut], tail[cut:]
                self._shown_length = len(text)
                return
        self._shown, self._shown_length = tail, len(self._decode(tail))


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None if it has none (prompts are ids then)."""
    config = read_object(directory / _CONFIG_FILE)
    if config.get("tokenizer_class") == BYTE_TOKENIZER_CLASS:
        return ByteTokenizer.from_config(config)
    path = directory / "tokenizer.json"
    return FileTokenizer(path) if path.is_file() else None


def _name(token: Any) -> Any:
    """The name of a token that a config spells as text or as {"content": text}."""
    return token.get("content") if isinstance(token, Mapping) else token


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has the lone surrogate {error.object[error.start]!r} at {error.start}, "
            "which is no character: send valid Unicode."
        ) from error


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: themselves, or those from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_BYTES) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
