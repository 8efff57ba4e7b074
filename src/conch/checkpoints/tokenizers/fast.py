"""Tokenizers of the library ``tokenizers``: from a tokenizer.json, from a GGUF file, or converted by transformers.

Encoding releases the GIL, and threads share a tokenizer without a lock. The encodings of two texts are combined here,
so that a text in many pairs is tokenised once; the library itself tokenises both texts of each pair.

``token_bytes`` returns the bytes that each token adds to a text, for libraries that compute the tokens allowed by a
grammar. They are obtained by decoding, because the vocabulary (``Ġ`` for a space, ``<0x41>`` for a byte) and the type
of decoder are often misleading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from conch.checkpoints.tokenizers import stream
from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.stream import spelt
from conch.checkpoints.tokenizers.tokenizer import (
    CHUNK,
    Ids,
    Side,
    SpecialTokens,
    TextTokenizer,
    Tokens,
    Truncation,
    refused,
)
from conch.checkpoints.tokenizers.words import WordIds, divides_at_spaces
from conch.core.errors import one_line, unsupported

#: Texts around a token that is decoded, so that it is never the first or last token.
_BEFORE, _AFTER = "a", "b"
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
#: Texts that check the result: the bytes of their tokens must join to the text. Their characters have one to four
#: bytes.
_EXAMPLES: Final = (
    '{"name": "Größe", "sizes": [1, -2.5e3],\n\t"of": {"東京": null, "ok": true}}',
    "yes, it's 12:30 \N{SPIRAL SHELL} \N{FAMILY}\r\n\n  - a_b = (c | d) * 10;",
)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of each token by id (empty for ids without a token), and the ids of special tokens.

    Special tokens have the bytes of their names, although they add no text.
    """

    tokens: Sequence[bytes]
    special_ids: frozenset[int]


def token_bytes(tokenizer: TextTokenizer) -> TokenBytes:
    """Return the bytes of all tokens. Raises UNSUPPORTED for a tokenizer whose tokens have no independent text."""
    fast = tokenizer.fast
    if fast is None:
        raise unsupported("the tokenizer is written in Python")
    names: dict[int, str] = {id: name for name, id in fast.get_vocab(with_added_tokens=True).items()}
    special_ids = frozenset(tokenizer.special.all_ids)
    tokens = [b""] * (max(names, default=-1) + 1)
    texts = _texts(tokenizer, names)
    for id, name in names.items():
        if id in special_ids:
            tokens[id] = name.encode()
            continue
        text = texts[id]
        tokens[id] = text.encode() if _INCOMPLETE not in text else spelt(name)
        if tokens[id].decode("utf-8", "replace") != text:
            raise unsupported(f"token {id} is {name!r} in the vocabulary and {text!r} in a text")
    known = TokenBytes(tokens, special_ids)
    for example in _EXAMPLES:
        _compare(known, tokenizer, example)
    return known


def _texts(tokenizer: TextTokenizer, ids: Any) -> dict[int, str]:
    """Return the text of each token in the middle of a text."""
    before, after = (tokenizer.encode(text, special_tokens=False) for text in (_BEFORE, _AFTER))
    alone, both = (_decoded(tokenizer, [sequence])[0] for sequence in (before, [*before, *after]))
    if not both.startswith(alone) or not alone or both == alone:
        raise unsupported("the tokenizer has no tokens for single letters")
    end = both[len(alone) :]
    texts = {}
    for id, whole in zip(ids, _decoded(tokenizer, [[*before, id, *after] for id in ids]), strict=True):
        if not (whole.startswith(alone) and whole.endswith(end)):
            raise unsupported(f"token {id} changes the text around it")
        texts[id] = whole[len(alone) : len(whole) - len(end)]
    return texts


def _compare(known: TokenBytes, tokenizer: TextTokenizer, example: str) -> None:
    before = tokenizer.encode(_BEFORE, special_tokens=False)
    ids = tokenizer.encode(example, special_tokens=False)
    whole, alone = _decoded(tokenizer, [[*before, *ids], before])
    joined = b"".join(known.tokens[id] for id in ids if id not in known.special_ids).decode("utf-8", "replace")
    if whole != alone + joined:
        raise unsupported(f"its tokens add {joined!r} to a text, in which they are {whole[len(alone) :]!r}")


def _decoded(tokenizer: TextTokenizer, sequences: Sequence[list[int]]) -> list[str]:
    try:
        texts: list[str] = tokenizer.fast.decode_batch(sequences, skip_special_tokens=True)
    except Exception as error:
        raise unsupported(f"the tokenizer does not decode its tokens: {one_line(error)}") from None
    return texts


def truncated_lengths(first: int, second: int, room: int, truncation: Truncation) -> tuple[int, int] | None:
    """Return the numbers of tokens to keep of a pair's texts with ``first`` and ``second`` tokens.

    None if only the first text may be truncated and the second leaves no tokens for it.
    """
    if truncation == "longest":
        return shares(first, second, room)
    if first + second <= room:
        return first, second
    return (room - second, second) if second < room else None


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the numbers of tokens to keep if the longer text is truncated first, as in ``tokenizers``."""
    if first + second <= room:
        return first, second
    room = max(room, 0)
    short, long = min(first, second), max(first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (long, short) if first > second else (short, long)


def cut(encoding: Any, length: int, side: str) -> None:
    """Truncate ``encoding`` to ``length`` tokens on ``side``; ``left`` keeps the last tokens.

    Halves it repeatedly, because an encoding stores removed tokens as further encodings of the remaining length, and
    post-processing combines each of them with each encoding of the other text.
    """
    while len(encoding) > 2 * length > 0:
        encoding.truncate((len(encoding) + 1) // 2, direction=side)
    encoding.truncate(length, direction=side)


def shortened(fast: Any, encoding: Any, length: int, side: str) -> Any:
    """Return ``encoding`` truncated to ``length`` tokens, without modifying it."""
    if len(encoding) <= length:
        return encoding
    copy = fast.post_process(encoding, None, False)
    cut(copy, length, side)
    return copy


def truncated_offsets(whole: Any, special: list[int], side: str) -> list[tuple[int, int]]:
    """Return the offsets of a truncated text; ``special`` is 1 for each token that is not part of the text.

    The offsets come from the ``whole`` encoding, because post-processing a second time trims them twice.
    """
    offsets: list[tuple[int, int]] = whole.offsets
    if len(special) == len(whole):
        return offsets
    inner = [span for span, added in zip(offsets, whole.special_tokens_mask, strict=True) if not added]
    count = len(special) - sum(special)
    kept = iter(inner[:count] if side == "right" else inner[len(inner) - count :])
    return [(0, 0) if added else next(kept) for added in special]


def left_of(ids: Ids, count: int, side: str) -> Ids:
    """Return ``count`` ids of those that remain if a text is cut off on ``side``."""
    return ids[:count] if side == "right" else ids[max(0, len(ids) - count) :]


class TokenTemplate(NamedTuple):
    """The special tokens before, between and after one or two texts; ``types`` are of these and of each text."""

    special: list[Ids]
    special_types: list[list[int]]
    types: list[int]

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return sum(map(len, self.special))

    def joined(self, texts: Sequence[Ids]) -> Ids:
        """Return INT64 ids of ``texts`` with special tokens."""
        first, *others = self.special
        return np.concatenate([first, *chain.from_iterable(zip(texts, others, strict=True))])

    def joined_types(self, texts: Sequence[Ids]) -> Ids:
        """Return the INT64 types of these ids."""
        types = [*self.special_types[0]]
        for text, own, special in zip(texts, self.types, self.special_types[1:], strict=True):
            types += [own] * len(text)
            types += special
        return np.array(types, np.int64)


def template_of(fast: Any, *texts: str) -> TokenTemplate:
    """Return the special tokens that a tokenizer of ``tokenizers`` adds to ``texts``, and the types of all tokens."""
    encoding = fast.encode(*texts)
    special: list[list[int]] = [[] for _ in range(len(texts) + 1)]
    special_types: list[list[int]] = [[] for _ in range(len(texts) + 1)]
    types: list[int] = []
    for id, kind, owner in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
        if owner is None:
            special[len(types)].append(id)
            special_types[len(types)].append(kind)
        elif owner == len(types):
            types.append(kind)
    return TokenTemplate([np.array(ids, np.int64) for ids in special], special_types, types)


class FastTokenizer(TextTokenizer):
    """A tokenizer of ``tokenizers``.

    ``side`` is the side on which texts are truncated; ``clean_up`` is ``clean_up_tokenization_spaces`` of
    tokenizer_config.json.
    """

    def __init__(
        self,
        fast: Any,
        special: SpecialTokens,
        template: ChatTemplate,
        *,
        types: bool = True,
        side: Side = "right",
        clean_up: bool = False,
    ) -> None:
        fast.no_truncation()
        fast.no_padding()
        self.fast = fast
        self.special = special
        self.template = template
        self.vocabulary = fast.get_vocab_size(with_added_tokens=True)
        self.types = types
        self.side = side
        self._single: TokenTemplate
        self._pair: TokenTemplate
        self._clean_up = clean_up and type(fast.model).__name__ != "BPE"
        # Few tokenizers give a single text types other than 0, and reading types takes time.
        self._types_of_one_text = any(fast.encode("").type_ids)
        self.reread()
        self._shown = stream.pieces_of(fast)
        #: The tables without special tokens, by the special tokens that are kept: none, or those of the output format.
        self._skipped: dict[frozenset[int], stream.BytePieces | stream.TextPieces | None] = {}

    def reread(self) -> None:
        """Adapt to changes of ``fast``, whose normalizer and added tokens determine which words can be kept."""
        self._words = WordIds(self.fast) if divides_at_spaces(self.fast) else None
        if self._words is not None:
            self._single, self._pair = template_of(self.fast, "a"), template_of(self.fast, "a", "a")

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._encodings([text], "the text", special_tokens=special_tokens)[0].ids
        return ids

    def encode_texts(
        self,
        texts: Sequence[str],
        limit: int,
        *,
        types: bool = False,
        offsets: bool = False,
        name: str = "the text",
        side: Side | None = None,
    ) -> Iterator[Tokens]:
        side = side or self.side
        types = types and self._types_of_one_text
        if self._words is not None and not types and not offsets:
            room = max(0, limit - self._single.size)
            for ids in self._ids(texts, name):
                kept = ids if len(ids) <= room else left_of(ids, room, side)
                yield Tokens(self._single.joined([kept]), None, len(ids) + self._single.size)
            return
        for start in range(0, len(texts), CHUNK):
            chunk = texts[start : start + CHUNK]
            for text, whole in zip(chunk, self._encodings(chunk, name, offsets=offsets), strict=True):
                length = len(whole)
                encoding = whole if length <= limit else self._shortened(text, limit, side)
                type_ids = np.array(encoding.type_ids, np.int64) if types else None
                tokens = Tokens(np.array(encoding.ids, np.int64), type_ids, length)
                if offsets:
                    tokens.special = encoding.special_tokens_mask
                    tokens.offsets = truncated_offsets(whole, tokens.special, side)
                yield tokens

    def encode_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        limit: int,
        *,
        types: bool = False,
        truncation: Truncation = "longest",
        names: tuple[str, str] = ("the text", "the text"),
        side: Side | None = None,
    ) -> Iterator[Tokens]:
        side = side or self.side
        special = self.special_token_count(pair=True)
        room = limit - special
        if self._words is not None:
            known: tuple[dict[str, Ids], ...] = tuple(
                dict(zip(distinct, self._ids(list(distinct), name), strict=True))
                for distinct, name in zip(map(dict.fromkeys, (firsts, seconds)), names, strict=True)
            )
            for first_text, second_text in zip(firsts, seconds, strict=True):
                parts = [known[0][first_text], known[1][second_text]]
                length = special + len(parts[0]) + len(parts[1])
                if (lengths := truncated_lengths(len(parts[0]), len(parts[1]), room, truncation)) is not None:
                    parts = [left_of(ids, count, side) for ids, count in zip(parts, lengths, strict=True)]
                yield Tokens(self._pair.joined(parts), self._pair.joined_types(parts) if types else None, length)
            return
        ones, twos = (
            self._parts(texts, name, limit, side) for texts, name in zip((firsts, seconds), names, strict=True)
        )
        for first_text, second_text in zip(firsts, seconds, strict=True):
            (first, first_length), (second, second_length) = ones[first_text], twos[second_text]
            length = special + first_length + second_length
            kept = truncated_lengths(first_length, second_length, room, truncation)
            if kept is not None:
                first_length, second_length = kept
                first = shortened(self.fast, first, first_length, side)
                second = shortened(self.fast, second, second_length, side)
            both = self.fast.post_process(first, second)
            yield Tokens(np.array(both.ids, np.int64), self._pair_types(both, first_length) if types else None, length)

    def special_token_count(self, *, pair: bool) -> int:
        count: int = self.fast.num_special_tokens_to_add(pair)
        return count

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, clean_up: bool = False) -> str:
        text: str = self.fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return without_spaces(text) if clean_up and self._clean_up else text

    def token(self, id: int) -> str:
        return self.fast.id_to_token(id) or ""

    def join(self, tokens: Sequence[str]) -> str:
        decoder = self.fast.decoder
        return decoder.decode(list(tokens)) if decoder is not None else " ".join(tokens)

    def piece(self, id: int) -> str:
        return self._shown.text(id) if self._shown is not None else self.decode([id], skip_special_tokens=False)

    def stream(
        self, *, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset(), after: Sequence[int] = ()
    ) -> stream.TextStream:
        pieces = self._shown
        if pieces is not None and skip_special_tokens:
            if kept not in self._skipped:
                self._skipped[kept] = stream.pieces_of(self.fast, self.special.all_ids - kept)
            pieces = self._skipped[kept]
        decode = stream.decoder_of(self.decode, self.special.all_ids, skip=skip_special_tokens, kept=kept)
        return stream.open_stream(pieces, decode, after)

    def _encodings(
        self, texts: Sequence[str], name: str, *, special_tokens: bool = True, offsets: bool = False
    ) -> list[Any]:
        encode = self.fast.encode_batch if offsets else self.fast.encode_batch_fast
        try:
            encodings: list[Any] = encode(texts, add_special_tokens=special_tokens)
        except BaseException as error:
            raise refused(error, name) from None
        return encodings

    def _ids(self, texts: Sequence[str], name: str) -> Iterator[Ids]:
        """Yield the ids of each text without special tokens, by its words."""
        assert self._words is not None
        encode = partial(self._encodings, name=name, special_tokens=False)
        for start in range(0, len(texts), CHUNK):
            yield from self._words.encode(texts[start : start + CHUNK], encode)

    def _shortened(self, text: str, limit: int, side: Side) -> Any:
        """Encode a text truncated to ``limit`` tokens on ``side``, including its special tokens."""
        [encoding] = self.fast.encode_batch([text], add_special_tokens=False)
        cut(encoding, limit - self.special_token_count(pair=False), side)
        return self.fast.post_process(encoding)

    def _parts(self, texts: Sequence[str], name: str, room: int, side: Side) -> dict[str, tuple[Any, int]]:
        """Encode each distinct text without special tokens, truncated to ``room`` tokens, with its original length."""
        distinct = list(dict.fromkeys(texts))
        parts: dict[str, tuple[Any, int]] = {}
        for start in range(0, len(distinct), CHUNK):
            chunk = distinct[start : start + CHUNK]
            for text, encoding in zip(chunk, self._encodings(chunk, name, special_tokens=False), strict=True):
                parts[text] = encoding, len(encoding)
                cut(encoding, room, side)
        return parts

    def _pair_types(self, both: Any, first: int) -> Ids:
        """Return the types of a pair whose first text has ``first`` tokens."""
        types = np.array(both.type_ids, np.int64)
        if not self.special_token_count(pair=True):
            # Without special tokens, post-processing separate encodings does not set the types.
            types[first:] = 1
        return types


def without_spaces(text: str) -> str:
    """Remove the spaces that a WordPiece tokenizer adds before punctuation and contractions."""
    for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced.strip(" "))
    return text
