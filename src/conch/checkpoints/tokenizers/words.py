"""Encodes texts by the token ids of their words, which are kept, for tokenizers that divide texts at every space.

The library takes about 2 µs per token with BERT's tokenizer, most of it for normalizing texts and tracking offsets.
Looking up the ids of the parts of a text between spaces takes a tenth of that. A part that is new is divided at
punctuation; the library encodes only words that are new.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from conch.checkpoints.tokenizers.tokenizer import Ids

#: The maximum number of parts and words that are kept; all are dropped when there are more.
MAX_KNOWN: Final = 1 << 17
#: Texts with a longer part (characters) are encoded by the library: few such parts are seen again.
MAX_CHARACTERS: Final = 64
#: The normalizers that treat each character by itself, or with the marks that follow it.
_NORMALIZERS: Final = frozenset({"BertNormalizer", "Lowercase", "NFD", "StripAccents"})
#: The words of printable ASCII: in BERT's pre-tokenizer, each punctuation mark is a word.
_WORDS: Final = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9]")

#: Encodes texts with the library, without special tokens.
Encode = Callable[[Sequence[str]], list[Any]]


class WordIds:
    """The ids of words of ``fast``, a tokenizer of ``tokenizers`` for which :func:`divides_at_spaces` is true.

    Several threads may encode at the same time.
    """

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self._added = [token.content for token in fast.get_added_tokens_decoder().values()]
        #: The ids of parts and words, as the bytes of INT64: joining bytes is faster than joining numbers.
        self._known: dict[str, bytes] = {"": b""}

    def encode(self, texts: Sequence[str], encode: Encode) -> list[Ids]:
        """Return the ids of each text, without special tokens, in read-only arrays.

        ``encode`` gets the texts with many new words, and those that the library refuses; its errors are not caught.
        """
        known = self._known
        divided = [_parts(text) for text in texts]
        ids = [_joined(known, parts) for parts in divided]
        left = [index for index, joined in enumerate(ids) if joined is None]
        if left:
            known = self._learn([divided[index] for index in left])
            for index in left:
                ids[index] = _joined(known, divided[index])
            left = [index for index in left if ids[index] is None]
        if left:
            for index, encoding in zip(left, encode([texts[index] for index in left]), strict=True):
                ids[index] = _packed(encoding)
        return [np.frombuffer(joined, np.int64) for joined in ids if joined is not None]

    def _learn(self, texts: Sequence[list[str]]) -> dict[str, bytes]:
        """Keep new parts of ``texts``, and return all; if many words of a text are new, a few of them are kept."""
        known = self._known
        new_parts: dict[str, list[str]] = {}
        new_words: dict[str, None] = {}
        for parts in texts:
            missing = list(dict.fromkeys([part for part in parts if part not in known]))
            if max(map(len, missing), default=0) > MAX_CHARACTERS:  # another thread may have kept them all
                continue
            if 2 * len(missing) > len(parts) + 4:  # the library encodes the text faster as a whole
                missing = missing[:2]
            for part in missing:
                new_parts[part] = words = self._words(part)
                new_words.update(dict.fromkeys([word for word in words if word not in known]))
        if len(known) + len(new_parts) + len(new_words) > MAX_KNOWN:
            known = self._known = {"": b""}
        try:
            encodings = self._fast.encode_batch_fast(list(new_words), add_special_tokens=False)
        except BaseException as error:  # a Rust panic; the library gets the whole texts, and the caller its error
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return known
        known.update({word: _packed(encoding) for word, encoding in zip(new_words, encodings, strict=True)})
        for part, words in new_parts.items():
            if (joined := _joined(known, words)) is not None:
                known[part] = joined
        return known

    def _words(self, part: str) -> list[str]:
        plain = part.isascii() and part.isprintable() and not any(token in part for token in self._added)
        return _WORDS.findall(part) if plain else [part]


def _parts(text: str) -> list[str]:
    """Divide a text at spaces, and at tabs and line breaks, which BERT's tokenizer treats as spaces."""
    for space in "\n\t\r":
        if space in text:
            text = text.replace(space, " ")
    return text.split(" ")


def _packed(encoding: Any) -> bytes:
    """Return the ids of an encoding of the library."""
    return np.array(encoding.ids, np.int64).tobytes()


def _joined(known: dict[str, bytes], parts: Sequence[str]) -> bytes | None:
    """Return the ids of ``parts`` in order; None if one is not known."""
    try:
        return b"".join(map(known.__getitem__, parts))
    except KeyError:
        return None


def divides_at_spaces(fast: Any) -> bool:
    """Whether the ids of a text are those of its words: for WordPiece models with BERT's normalizer."""
    if type(fast.model).__name__ != "WordPiece" or type(fast.pre_tokenizer).__name__ != "BertPreTokenizer":
        return False
    if fast.model.token_to_id(fast.model.unk_token) is None:
        return False  # unknown words are errors
    added = fast.get_added_tokens_decoder().values()
    if any(token.normalized or _parts(token.content) != [token.content] for token in added):
        return False
    normalizer = fast.normalizer
    return normalizer is None or all(kind in _NORMALIZERS for kind in _kinds(json.loads(normalizer.__getstate__())))


def _kinds(normalizer: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a normalizer, given as in tokenizer.json."""
    if normalizer["type"] == "Sequence":
        for part in normalizer["normalizers"]:
            yield from _kinds(part)
    else:
        yield str(normalizer["type"])
