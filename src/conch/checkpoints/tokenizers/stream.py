"""Incremental detokenizers: convert token ids to text as they arrive, with the same result as decoding all at once.

Runs in a worker's engine thread, for every sequence at every step. If the tokenizer's decoder works token by token, as
is usual for generative models, the text of a token comes from a table. Otherwise the last few tokens are decoded again.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final

#: Replaces the preceding text when a token is decoded on its own; no decoder changes it.
_ANCHOR: Final = "a"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)
#: Decoders of ``tokenizers`` that decode each token independently, except for the first one.
_SINGLE: Final = frozenset({"ByteFallback", "Metaspace", "Replace", "WordPiece"})
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
#: The maximum number of bytes in a character; this many tokens contain at least one whole character.
_LONGEST_CHARACTER: Final = 4


class TextStream(ABC):
    """The detokenizer of a sequence: the texts that ``add`` and ``flush`` return add up to the text of all ids."""

    __slots__ = ()

    @abstractmethod
    def add(self, ids: Sequence[int]) -> str:
        """Add ids; returns the new text that later ids cannot change, and holds back the rest."""

    @abstractmethod
    def flush(self) -> str:
        """Return the text that was held back, after the last id; U+FFFD replaces an incomplete character."""


#: Returns the token of an id, None for a hidden token.
Token = Callable[[int], str | None]


class BytePieces(dict[int, bytes]):
    """The bytes of each token of a byte-level BPE tokenizer; filled as tokens occur. Thread-safe."""

    def __init__(self, token: Token) -> None:
        self._token = token

    def __missing__(self, id: int) -> bytes:
        token = self._token(id)
        piece = bytes_of(token) if token is not None else b""
        self[id] = piece
        return piece

    def text(self, id: int) -> str:
        """Return the text of a single token."""
        return self[id].decode("utf-8", "replace")


class TokenKind(Enum):
    """Kinds of tokens without text: a single byte of a character, or a hidden token."""

    BYTE = 1
    HIDDEN = 2


class TextPieces(dict[int, str | TokenKind]):
    """The text of each token except the first of a sequence; filled as tokens occur. Thread-safe.

    ``decode`` converts tokens to text. The first token of a text is decoded separately because it may lose its space.
    """

    def __init__(self, token: Token, decode: Callable[[list[str]], str], *, byte_fallback: bool) -> None:
        self.token = token
        self.decode = decode
        self._byte_fallback = byte_fallback

    def __missing__(self, id: int) -> str | TokenKind:
        token = self.token(id)
        piece: str | TokenKind
        if token is None:
            piece = TokenKind.HIDDEN
        elif self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            piece = TokenKind.BYTE
        else:
            piece = self.continuation([token])
        self[id] = piece
        return piece

    def continuation(self, tokens: list[str]) -> str:
        """Return the text that tokens add after other text."""
        return self.decode([_ANCHOR, *tokens])[len(_ANCHOR) :]

    def text(self, id: int) -> str:
        """Return the text of a single token, including the space before it."""
        token = self.token(id)
        return "" if token is None else self.continuation([token])


class ByteStream(TextStream):
    """The detokenizer of byte-level BPE: tokens are bytes, and only complete characters are returned."""

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._pieces.__getitem__, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class PieceStream(TextStream):
    """The detokenizer of SentencePiece and similar tokenizers, whose tokens are texts or single bytes.

    Consecutive bytes are held back until another token arrives, because one invalid byte makes all of them U+FFFD.
    """

    __slots__ = ("_bytes", "_pieces", "_started")

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._started = False
        self._bytes: list[str] = []

    def add(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        text = []
        for id in ids:
            piece = pieces[id]
            if piece is TokenKind.HIDDEN:
                continue
            if piece is TokenKind.BYTE:
                self._bytes.append(pieces.token(id) or "")
                continue
            if self._bytes:
                text.append(self.flush())
            text.append(piece if self._started else pieces.decode([pieces.token(id) or ""]))
            self._started = True
        return "".join(text)

    def flush(self) -> str:
        kept, self._bytes = self._bytes, []
        if not kept:
            return ""
        started, self._started = self._started, True
        return self._pieces.continuation(kept) if started else self._pieces.decode(kept)


class WindowStream(TextStream):
    """The detokenizer of other tokenizers.

    At each new token, decodes the tokens since the last complete character again, together with the tokens before them.
    """

    __slots__ = ("_decode", "_read", "_window")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0

    def add(self, ids: Sequence[int]) -> str:
        return "".join(self._add_one(id) for id in ids)

    def _add_one(self, id: int) -> str:
        self._window.append(id)
        before = self._decode(self._window[: self._read])
        after = self._decode(self._window)
        waiting = len(self._window) - self._read
        if len(after) <= len(before) or (after.endswith(_INCOMPLETE) and waiting < _LONGEST_CHARACTER):
            return ""
        return self._added_text(before, after)

    def flush(self) -> str:
        if self._read == len(self._window):
            return ""
        return self._added_text(self._decode(self._window[: self._read]), self._decode(self._window))

    def _added_text(self, before: str, after: str) -> str:
        del self._window[: self._read]
        self._read = len(self._window)
        return after[len(before) :]


def decoder_of(
    decode: Callable[..., str], special: frozenset[int], *, skip: bool, kept: frozenset[int]
) -> Callable[[list[int]], str]:
    """Return a function that decodes ids with ``decode`` of a tokenizer: without ``special`` ids, except those kept."""
    if not (skip and kept):
        return lambda ids: decode(ids, skip_special_tokens=skip)
    hidden = special - kept
    return lambda ids: decode([id for id in ids if id not in hidden], skip_special_tokens=False)


def open_stream(
    pieces: BytePieces | TextPieces | None, decode: Callable[[list[int]], str], after: Sequence[int]
) -> TextStream:
    """Open a stream with a table, or with ``decode`` if it is None; omits the text of the preceding ids ``after``."""
    stream: TextStream
    match pieces:
        case BytePieces():
            stream = ByteStream(pieces)
        case TextPieces():
            stream = PieceStream(pieces)
        case None:
            stream = WindowStream(decode)
    if after:
        stream.add(after)
    return stream


def pieces_of(tokenizer: Any, hidden: Iterable[int] = ()) -> BytePieces | TextPieces | None:
    """Return the table for a tokenizer of ``tokenizers``, or None if its decoder does not work token by token.

    Tokens in ``hidden`` have no text.
    """
    decoder = tokenizer.decoder
    try:
        chain = _chain(json.loads(decoder.__getstate__()))
    except (AttributeError, TypeError, ValueError):
        return None  # no decoder, or one written in Python
    left_out = frozenset(hidden)

    def token(id: int) -> str | None:
        return None if id in left_out else tokenizer.id_to_token(id)

    kinds = [step.get("type") for step in chain]
    if kinds == ["ByteLevel"]:
        return BytePieces(token)
    if _is_single(chain) and decoder.decode([_ANCHOR]) == _ANCHOR:
        return TextPieces(token, decoder.decode, byte_fallback="ByteFallback" in kinds)
    return None


def _chain(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the decoders of a sequence in order."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _chain(inner)]


def _is_single(chain: list[dict[str, Any]]) -> bool:
    """Whether the text of a token depends only on the token and on whether it is the first."""
    fused = False
    for step in chain:
        if step.get("type") == "Fuse":
            fused = True
        elif step.get("type") == "Strip":
            # After Fuse, Strip applies to the whole text; one character at its start belongs to the first token.
            if not fused or step.get("start", 0) > 1 or step.get("stop", 0):
                return False
        elif fused or step.get("type") not in _SINGLE:
            return False
    return True


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes stand for themselves, the others are U+0100 and following."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES: Final = _byte_of_character()


def spelt(name: str) -> bytes:
    """Return the bytes that the name of a token represents; they may end within a character."""
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else bytes_of(name)


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet, or its UTF-8 bytes if it has other characters."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
