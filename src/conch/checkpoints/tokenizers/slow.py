"""Tokenizers of checkpoints without ``tokenizer.json``, by transformers.

Most become a tokenizer of ``tokenizers`` there; what remains is written in Python and used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.encode import Encoder, Tokens, Truncation
from conch.checkpoints.tokenizers.fast import FastEncoder
from conch.errors import invalid, one_line, unsupported


def open_with_transformers(checkpoint: Checkpoint, options: Options) -> Encoder:
    """What AutoTokenizer finds in the folder; INVALID_ARG when it finds nothing."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise unsupported(
            f"'{checkpoint.source}' has no tokenizer.json, and its tokenizer needs transformers: "
            'pip install "conch[huggingface]"'
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(checkpoint.directory), trust_remote_code=options.trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise invalid(f"'{checkpoint.source}' has no tokenizer that transformers can load: {one_line(error)}") from None
    if getattr(tokenizer, "is_fast", False):
        return FastEncoder(checkpoint, options, tokenizer.backend_tokenizer)
    return SlowEncoder(checkpoint, options, tokenizer)


class SlowEncoder(Encoder):
    """A tokenizer in Python: no offsets, one thread at a time."""

    fast = None

    def __init__(self, checkpoint: Checkpoint, options: Options, tokenizer: Any) -> None:
        super().__init__(checkpoint, options)
        self._tokenizer = tokenizer
        self._lock = Lock()
        self.typed = self.typed and "token_type_ids" in tokenizer.model_input_names
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.unknown_id = tokenizer.unk_token_id
        self.mask_id = tokenizer.mask_token_id
        self.cls_id = tokenizer.cls_token_id
        self.room()

    def special_tokens(self, *, pair: bool) -> int:
        return int(self._tokenizer.num_special_tokens_to_add(pair))

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
        items: list[Tokens] = []
        cut: set[int] = set()
        for index, text in enumerate(texts):
            pair = None if pairs is None else pairs[index]
            row = index // per_row
            encoded = self._encode(text, pair, truncation=False)
            length = len(encoded["input_ids"])
            if not length:
                raise self.empty(names[0], row)
            if length > self.max_length:
                if self.refuse:
                    raise self.too_long(names[0], row, length)
                encoded = self._encode(
                    text,
                    pair,
                    truncation="only_first" if truncation == "first" else "longest_first",
                    max_length=self.max_length,
                )
                if len(encoded["input_ids"]) > self.max_length:
                    raise self.too_long(names[1], row, len(encoded["input_ids"]))
                cut.add(row)
            types = encoded.get("token_type_ids") if self.typed else None
            items.append(
                Tokens(
                    np.array(encoded["input_ids"], np.int64),
                    None if types is None else np.array(types, np.int64),
                )
            )
        return items, len(cut)

    def _encode(self, text: str, pair: str | None, **settings: Any) -> dict[str, Any]:
        with self._lock:
            return dict(self._tokenizer(text, pair, verbose=False, **settings))

    def token(self, id: int) -> str:
        with self._lock:
            return str(self._tokenizer.convert_ids_to_tokens(id))

    def join(self, tokens: Sequence[str]) -> str:
        with self._lock:
            return str(self._tokenizer.convert_tokens_to_string(list(tokens)))

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))
