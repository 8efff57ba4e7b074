"""A tokenizer that transformers has in Python only: no offsets, one thread at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np

from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.special_tokens import SpecialTokens
from conch.checkpoints.tokenizers.stream import TextStream, open_stream
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer, Tokens, Truncation, refused


class SlowTokenizer(TextTokenizer):
    """``slow`` is a ``PreTrainedTokenizer`` of transformers."""

    fast = None

    def __init__(self, slow: Any, special: SpecialTokens, template: ChatTemplate, *, types: bool = False) -> None:
        self._slow = slow
        self._lock = Lock()
        self.special = special
        self.template = template
        self.vocabulary = len(slow)
        self.types = types

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._encoded("the text", text, add_special_tokens=special_tokens)["input_ids"]
        return ids

    def encode_texts(
        self, texts: Sequence[str], limit: int, *, types: bool = False, offsets: bool = False, name: str = "the text"
    ) -> Iterator[Tokens]:
        for text in texts:
            yield self._tokens(name, text, None, limit, types, "longest")

    def encode_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        limit: int,
        *,
        types: bool = False,
        truncation: Truncation = "longest",
        names: tuple[str, str] = ("the text", "the text"),
    ) -> Iterator[Tokens]:
        for first, second in zip(firsts, seconds, strict=True):
            yield self._tokens(names[0], first, second, limit, types, truncation)

    def special_token_count(self, *, pair: bool) -> int:
        return int(self._slow.num_special_tokens_to_add(pair))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, clean_up: bool = False) -> str:
        with self._lock:
            return str(
                self._slow.decode(
                    list(ids),
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=None if clean_up else False,  # None: as its settings say
                )
            )

    def token(self, id: int) -> str:
        with self._lock:
            return str(self._slow.convert_ids_to_tokens(id))

    def join(self, tokens: Sequence[str]) -> str:
        with self._lock:
            return str(self._slow.convert_tokens_to_string(list(tokens)))

    def piece(self, id: int) -> str:
        return self.decode([id], skip_special_tokens=False)

    def stream(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> TextStream:
        return open_stream(None, lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), after)

    def _tokens(
        self, name: str, text: str, pair: str | None, limit: int, types: bool, truncation: Truncation
    ) -> Tokens:
        encoded = self._encoded(name, text, pair, truncation=False)
        length = len(encoded["input_ids"])
        if length > limit:
            strategy = "only_first" if truncation == "first" else "longest_first"
            encoded = self._encoded(name, text, pair, truncation=strategy, max_length=limit)
        given = encoded.get("token_type_ids") if types else None
        return Tokens(
            np.array(encoded["input_ids"], np.int64), None if given is None else np.array(given, np.int64), length
        )

    def _encoded(self, name: str, *texts: str | None, **settings: Any) -> dict[str, Any]:
        try:
            with self._lock:
                return dict(self._slow(*texts, verbose=False, **settings))
        except BaseException as error:
            raise refused(error, name) from None
