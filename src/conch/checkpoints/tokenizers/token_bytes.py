"""The bytes that each token adds to a text, for libraries that compute the tokens allowed by a grammar.

They are obtained by decoding, because the vocabulary (``Ġ`` for a space, ``<0x41>`` for a byte) and the type of decoder
are often misleading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from conch.checkpoints.tokenizers.stream import bytes_of
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer
from conch.core.errors import one_line, unsupported

#: Texts around a token that is decoded, so that it is never the first or last token.
_BEFORE, _AFTER = "a", "b"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)
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

    def difference(self, others: Mapping[int, bytes]) -> str:
        """Describe the first difference from another table of tokens by id; empty if there is none.

        Ignores special tokens.
        """
        for id, expected in enumerate(self.tokens):
            token = others.get(id, expected)
            if token != expected and expected and id not in self.special_ids:
                return f"token {id} is {token!r} and not {expected!r}"
        return ""


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
        tokens[id] = text.encode() if _INCOMPLETE not in text else _spelt(name)
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


def _spelt(name: str) -> bytes:
    """Return the bytes that the name of a token represents; they may end within a character."""
    byte = _BYTE.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else bytes_of(name)
