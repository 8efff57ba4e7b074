"""The tokenizer of a checkpoint with a ``tokenizer.json``; what ``tokenizing.open_encoder`` usually gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from conch.backends.native.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.encode import CHUNK, Encoder, Tokens, Truncation
from conch.errors import invalid


class FastEncoder(Encoder):
    """A ``tokenizer.json``, by the library that it was made for; the GIL is free while it works."""

    fast: Tokenizer

    def __init__(self, checkpoint: Checkpoint, options: Options, tokenizer: Tokenizer) -> None:
        super().__init__(checkpoint, options)
        settings = checkpoint.json("tokenizer_config.json") or {}
        special = {**(checkpoint.json("special_tokens_map.json") or {}), **settings}
        padding = tokenizer.padding or {}
        truncation = tokenizer.truncation or {}
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.fast = tokenizer
        self.side = settings.get("truncation_side") or truncation.get("direction") or "right"
        self.clean = bool(settings.get("clean_up_tokenization_spaces")) and type(tokenizer.model).__name__ != "BPE"
        self.typed = self.typed and "token_type_ids" in settings.get("model_input_names", ["token_type_ids"])
        self.unknown_id = self._special(special, "unk_token")
        self.mask_id = self._special(special, "mask_token")
        self.cls_id = self._special(special, "cls_token")
        candidates = (self._special(special, "pad_token"), checkpoint.config.get("pad_token_id"), padding.get("pad_id"))
        self.pad_id = next((one for one in candidates if isinstance(one, int) and one >= 0), 0)
        # Hardly any tokenizer gives a single text other types than 0, and reading them costs time.
        self._typed_single = self.typed and any(tokenizer.encode("").type_ids)
        self.room()

    def _special(self, special: dict[str, Any], role: str) -> int | None:
        token = special.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        return self.fast.token_to_id(text) if isinstance(text, str) else None

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        names: tuple[str, str] = ("text_input", "text_pair"),
        per_row: int = 1,
        offsets: bool = False,
        truncation: Truncation = "longest",
    ) -> tuple[list[Tokens], int]:
        if pairs is not None:
            return self._encode_pairs(texts, pairs, names, per_row, truncation)
        typed = self._typed_single
        limit = self.max_length
        items: list[Tokens] = []
        cut: set[int] = set()
        for start in range(0, len(texts), CHUNK):
            encodings = self._tokenised(texts[start : start + CHUNK], names[0], offsets=offsets)
            for index, encoding in enumerate(encodings, start):
                length = len(encoding)
                whole = encoding
                if not 0 < length <= limit:
                    row = index // per_row
                    if not length:
                        raise self.empty(names[0], row)
                    if self.refuse:
                        raise self.too_long(names[0], row, length)
                    encoding = self._shorten(texts[index])
                    cut.add(row)
                ids = np.array(encoding.ids, np.int64)
                item = Tokens(ids, np.array(encoding.type_ids, np.int64) if typed else None)
                if offsets:
                    item.special = encoding.special_tokens_mask
                    item.offsets = self._offsets(whole, item.special)
                items.append(item)
        return items, len(cut)

    def special_tokens(self, *, pair: bool) -> int:
        count: int = self.fast.num_special_tokens_to_add(pair)
        return count

    def _tokenised(
        self, texts: Sequence[str], name: str, *, special: bool = True, offsets: bool = False
    ) -> list[Encoding]:
        encode = self.fast.encode_batch if offsets else self.fast.encode_batch_fast
        try:
            encodings: list[Encoding] = encode(texts, add_special_tokens=special)
        except BaseException as error:
            # A panic in Rust is no Exception, and no more than one request's fault.
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise invalid(f"input '{name}' cannot be tokenised: {error}") from None
        return encodings

    def _shorten(self, text: str) -> Encoding:
        """A text cut to the maximum length before the special tokens are put around it."""
        [encoding] = self.fast.encode_batch([text], add_special_tokens=False)
        self._cut(encoding, self.room())
        return self.fast.post_process(encoding)

    def _encode_pairs(
        self, texts: Sequence[str], pairs: Sequence[str], names: tuple[str, str], per_row: int, truncation: Truncation
    ) -> tuple[list[Tokens], int]:
        """What ``encode`` gives for pairs; a text that is part of many of them is tokenised once."""
        room = self.room(pair=True)
        firsts, seconds = (self._parts(side, name, room) for side, name in zip((texts, pairs), names, strict=True))
        items: list[Tokens] = []
        cut: set[int] = set()
        for index, (text, pair) in enumerate(zip(texts, pairs, strict=True)):
            (first, one), (second, two) = firsts[text], seconds[pair]
            row = index // per_row
            length = self.max_length - room + one + two
            if not length:
                raise self.empty(names[0], row)
            if one + two > room:
                if self.refuse:
                    raise self.too_long(names[0], row, length)
                if truncation == "longest":
                    one, two = shares(one, two, room)
                elif two < room:
                    one = room - two
                else:
                    raise self.too_long(names[1], row, two)
                first, second = self._beginning(first, one), self._beginning(second, two)
                cut.add(row)
            both = self.fast.post_process(first, second)
            items.append(Tokens(np.array(both.ids, np.int64), self._types(both, one) if self.typed else None))
        return items, len(cut)

    def _parts(self, texts: Sequence[str], name: str, room: int) -> dict[str, tuple[Encoding, int]]:
        """Each of the texts without special tokens, cut to ``room`` tokens, and how many it had."""
        distinct = list(dict.fromkeys(texts))
        parts: dict[str, tuple[Encoding, int]] = {}
        for start in range(0, len(distinct), CHUNK):
            chunk = distinct[start : start + CHUNK]
            for text, encoding in zip(chunk, self._tokenised(chunk, name, special=False), strict=True):
                parts[text] = encoding, len(encoding)
                self._cut(encoding, room)
        return parts

    def _beginning(self, encoding: Encoding, length: int) -> Encoding:
        """The first ``length`` tokens (the last, where texts are cut on the left); ``encoding`` stays as it is."""
        if len(encoding) <= length:
            return encoding
        copy = self.fast.post_process(encoding, None, False)
        self._cut(copy, length)
        return copy

    def _types(self, both: Encoding, first: int) -> Array:
        """The types of a pair whose first text has ``first`` tokens."""
        types = np.array(both.type_ids, np.int64)
        if not self.special_tokens(pair=True):
            # Where nothing is put around them, only tokenising both at once would tell them apart.
            types[first:] = 1
        return types

    def _cut(self, encoding: Encoding, length: int) -> None:
        """Keep ``length`` tokens.

        By halves, since an encoding keeps what is cut off in pieces of the length that stays, and post-processing
        combines each piece of a text with each of its pair.
        """
        while len(encoding) > 2 * length > 0:
            encoding.truncate((len(encoding) + 1) // 2, direction=self.side)
        encoding.truncate(length, direction=self.side)

    def _offsets(self, whole: Encoding, special: list[int]) -> list[tuple[int, int]]:
        """The offsets of what is left of a single text: post-processing it again has trimmed them twice."""
        offsets: list[tuple[int, int]] = whole.offsets
        if len(special) == len(whole):
            return offsets
        inner = [place for place, added in zip(offsets, whole.special_tokens_mask, strict=True) if not added]
        count = len(special) - sum(special)
        kept = iter(inner[:count] if self.side == "right" else inner[len(inner) - count :])
        return [(0, 0) if added else next(kept) for added in special]

    def token(self, id: int) -> str:
        return self.fast.id_to_token(id) or ""

    def join(self, tokens: Sequence[str]) -> str:
        decoder = self.fast.decoder
        return decoder.decode(list(tokens)) if decoder is not None else " ".join(tokens)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        text = self.fast.decode(ids, skip_special_tokens=skip_special)
        return without_spaces(text) if self.clean else text


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of a pair stay when the longer one gives way first, as ``tokenizers`` does it."""
    if first + second <= room:
        return first, second
    room = max(room, 0)
    short, long = min(first, second), max(first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (long, short) if first > second else (short, long)


def without_spaces(text: str) -> str:
    """Text without the spaces that a WordPiece tokenizer puts before punctuation and contractions."""
    for found in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(found, found.strip(" "))
    return text
