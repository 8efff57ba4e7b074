"""Token ids to text as they come, exactly as decoding all of them at once would give it.

Runs in a worker's engine thread, for every sequence at every step.  What a token adds to a text is looked up in a table
where the tokenizer's decoder works token by token, which those of generating models do; other decoders are asked about
the last few tokens again.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final

#: Decoded in front of a token in place of the text before it; no decoder changes it.
_ANCHOR: Final = "a"
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>", re.ASCII)
#: Decoders of ``tokenizers`` that know of other tokens no more than whether one is the first.
_SINGLE: Final = frozenset({"ByteFallback", "Metaspace", "Replace", "WordPiece"})
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
#: A character has at most four bytes, so that as many tokens have at least one whole character.
_LONGEST_CHARACTER: Final = 4


class TextStream(ABC):
    """The text of one sequence.  All that ``add`` and ``flush`` return is the text of all ids together."""

    __slots__ = ()

    @abstractmethod
    def add(self, ids: Sequence[int]) -> str:
        """The text that is certain now: what later ids might change is kept back."""

    @abstractmethod
    def flush(self) -> str:
        """The text that was kept back, when no ids follow; U+FFFD stands for half a character."""


#: The tokens of ids, None for one that is not shown.
Token = Callable[[int], str | None]


class BytePieces(dict[int, bytes]):
    """What each token adds to a text of bytes (byte-level BPE); filled as tokens occur.  Threads may share it."""

    def __init__(self, token: Token) -> None:
        self._token = token

    def __missing__(self, id: int) -> bytes:
        token = self._token(id)
        piece = bytes_of(token) if token is not None else b""
        self[id] = piece
        return piece

    def text(self, id: int) -> str:
        """The text of a token on its own."""
        return self[id].decode("utf-8", "replace")


class TokenKind(Enum):
    """Tokens without a text of their own: a byte of one, or one that is not shown."""

    BYTE = 1
    HIDDEN = 2


class TextPieces(dict[int, str | TokenKind]):
    """What each token adds to a text that has begun; filled as tokens occur.  Threads may share it.

    ``decode`` makes a text of tokens.  The first token of a text may lose its space, so it is decoded on its own.
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
        """What tokens add to a text that has begun."""
        return self.decode([_ANCHOR, *tokens])[len(_ANCHOR) :]

    def text(self, id: int) -> str:
        """The text of a token on its own, with the space before it."""
        token = self.token(id)
        return "" if token is None else self.continuation([token])


class ByteStream(TextStream):
    """Byte-level BPE: tokens are bytes, and characters come out when they are complete."""

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._pieces.__getitem__, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class PieceStream(TextStream):
    """SentencePiece and the like: tokens are texts or, where no token has a character, its bytes.

    Bytes in a row are kept until another token comes: one wrong byte among them makes all of them U+FFFD.
    """

    __slots__ = ("_begun", "_bytes", "_pieces")

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._begun = False
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
            text.append(piece if self._begun else pieces.decode([pieces.token(id) or ""]))
            self._begun = True
        return "".join(text)

    def flush(self) -> str:
        kept, self._bytes = self._bytes, []
        if not kept:
            return ""
        begun, self._begun = self._begun, True
        return self._pieces.continuation(kept) if begun else self._pieces.decode(kept)


class WindowStream(TextStream):
    """Any other tokenizer: the tokens since the last character's end are decoded again, with some before them."""

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
        return self._taken(before, after)

    def flush(self) -> str:
        if self._read == len(self._window):
            return ""
        return self._taken(self._decode(self._window[: self._read]), self._decode(self._window))

    def _taken(self, before: str, after: str) -> str:
        del self._window[: self._read]
        self._read = len(self._window)
        return after[len(before) :]


def open_stream(
    pieces: BytePieces | TextPieces | None, decode: Callable[[list[int]], str], after: Sequence[int]
) -> TextStream:
    """A stream over a table, or over ``decode`` where there is none; the text of the ids ``after`` is not given."""
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
    """The table for a tokenizer of ``tokenizers``; None where its decoder has to see tokens together.

    The tokens ``hidden`` add nothing.
    """
    decoder = tokenizer.decoder
    try:
        chain = _chain(json.loads(decoder.__getstate__()))
    except (AttributeError, TypeError, ValueError):
        return None  # none, or one written in Python
    left_out = frozenset(hidden)

    def token(id: int) -> str | None:
        return None if id in left_out else tokenizer.id_to_token(id)

    kinds = [one.get("type") for one in chain]
    if kinds == ["ByteLevel"]:
        return BytePieces(token)
    if _is_single(chain) and decoder.decode([_ANCHOR]) == _ANCHOR:
        return TextPieces(token, decoder.decode, byte_fallback="ByteFallback" in kinds)
    return None


def _chain(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoders that work one after the other."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [one for inner in decoder["decoders"] for one in _chain(inner)]


def _is_single(chain: list[dict[str, Any]]) -> bool:
    """Whether the text of a token depends on nothing but the token and whether it is the first."""
    fused = False
    for one in chain:
        if one.get("type") == "Fuse":
            fused = True
        elif one.get("type") == "Strip":
            # Of the text as a whole, no more than the first character, which the first token has.
            if not fused or one.get("start", 0) > 1 or one.get("stop", 0):
                return False
        elif fused or one.get("type") not in _SINGLE:
            return False
    return True


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES: Final = _byte_of_character()


def bytes_of(token: str) -> bytes:
    """The bytes that a token stands for; one with a character outside the alphabet stands for itself."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
