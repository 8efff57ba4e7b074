"""Opens the tokenizer of a checkpoint: from tokenizer.json, from a GGUF file, or else through transformers.

Used by workers when a model is loaded, and by ``conch convert``. ``tokenizers`` and transformers are imported only if a
checkpoint needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.chat import ChatTemplate, read_file, templates_of
from conch.checkpoints.tokenizers.chat_limits import SECONDS
from conch.checkpoints.tokenizers.fast import FastTokenizer
from conch.checkpoints.tokenizers.gguf import open_gguf
from conch.checkpoints.tokenizers.special_tokens import ROLES, SpecialTokens, add_missing, texts_by_role
from conch.checkpoints.tokenizers.stream import TextStream, open_stream
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer, Tokens, Truncation, refused
from conch.core.errors import ConchError, invalid, one_line
from conch.machine import extras


class SlowTokenizer(TextTokenizer):
    """A tokenizer written in Python: ``slow`` is a ``PreTrainedTokenizer`` of transformers."""

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
                    clean_up_tokenization_spaces=None if clean_up else False,  # None: use the tokenizer's setting
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
        type_ids = encoded.get("token_type_ids") if types else None
        return Tokens(
            np.array(encoded["input_ids"], np.int64), None if type_ids is None else np.array(type_ids, np.int64), length
        )

    def _encoded(self, name: str, *texts: str | None, **settings: Any) -> dict[str, Any]:
        try:
            with self._lock:
                return dict(self._slow(*texts, verbose=False, **settings))
        except BaseException as error:
            raise refused(error, name) from None


#: The name of token types in tokenizers; ``model_input_names`` has it if the network gets them.
TYPES: Final = "token_type_ids"


def open_tokenizer(checkpoint: Checkpoint, *, chat_template: Path | None = None) -> TextTokenizer:
    """Open the tokenizer of a checkpoint; ``chat_template`` is a file that replaces its own template.

    Raises INVALID_ARG for files that cannot be read, UNSUPPORTED if a library is missing.
    """
    tokenizer = _opened(checkpoint, read_file(chat_template) if chat_template is not None else None)
    tokenizer.template.seconds = _template_seconds(checkpoint)
    return tokenizer


def _template_seconds(checkpoint: Checkpoint) -> float:
    seconds = checkpoint.options.number("chat_template_timeout", SECONDS)
    if seconds <= 0:
        raise invalid(f"parameter 'chat_template_timeout' is {seconds:g}; it must be more than 0")
    return seconds


def _opened(checkpoint: Checkpoint, replaced: dict[str, str] | None) -> TextTokenizer:
    """Open the tokenizer with the chat templates in ``replaced``, or with those of the checkpoint if it is None."""
    if checkpoint.gguf is not None:
        return open_gguf(checkpoint.gguf, replaced, extra=checkpoint.extra)
    settings = checkpoint.json("tokenizer_config.json") or {}
    templates = templates_of(checkpoint.directory, settings) if replaced is None else replaced
    settings = {**(checkpoint.json("special_tokens_map.json") or {}), **settings}
    if checkpoint.has("tokenizer.json"):
        return _of_json(checkpoint, settings, templates)
    return _with_transformers(checkpoint, settings, templates)


def _of_json(checkpoint: Checkpoint, settings: dict[str, Any], templates: dict[str, str]) -> TextTokenizer:
    path = checkpoint.directory / "tokenizer.json"
    extras.require(str(path), "tokenizers", extra=checkpoint.extra)
    from tokenizers import Tokenizer

    try:
        fast: Any = Tokenizer.from_file(str(path))
    except Exception as error:
        raise invalid(f"the tokenizer of '{checkpoint.source}' cannot be read: {path}: {one_line(error)}") from None
    special_ids = add_missing(fast, settings)
    types = TYPES in settings.get("model_input_names", [TYPES])
    return _fast(checkpoint, fast, settings, templates, texts_by_role(settings), special_ids, types)


def original_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the tokenizer loaded by transformers' ``AutoTokenizer``, or None if it cannot be loaded."""
    try:
        return _load(checkpoint)
    except ConchError:
        return None


def _load(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer through transformers.

    Raises INVALID_ARG if it cannot be loaded, UNSUPPORTED if transformers is not installed.
    """
    extras.require(f"'{checkpoint.source}' has no tokenizer.json, and its tokenizer", "transformers")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(checkpoint.directory),
            trust_remote_code=checkpoint.options.trust_remote_code,
            local_files_only=True,
        )
    except Exception as error:
        raise invalid(f"'{checkpoint.source}' has no tokenizer that transformers can load: {one_line(error)}") from None


def _with_transformers(checkpoint: Checkpoint, settings: dict[str, Any], templates: dict[str, str]) -> TextTokenizer:
    loaded = _load(checkpoint)
    texts = texts_by_role(settings) | {role: str(own) for role in ROLES if (own := getattr(loaded, role, None))}
    special_ids = frozenset(int(id) for id in loaded.all_special_ids)
    types = TYPES in loaded.model_input_names
    if getattr(loaded, "is_fast", False):
        return _fast(checkpoint, loaded.backend_tokenizer, settings, templates, texts, special_ids, types)
    special = _special(checkpoint, texts, loaded.convert_tokens_to_ids, special_ids)
    return SlowTokenizer(loaded, special, ChatTemplate(templates, texts, str(checkpoint.directory)), types=types)


def _fast(
    checkpoint: Checkpoint,
    fast: Any,
    settings: dict[str, Any],
    templates: dict[str, str],
    texts: dict[str, str],
    special_ids: frozenset[int],
    types: bool,
) -> FastTokenizer:
    padding, truncation = fast.padding or {}, fast.truncation or {}
    return FastTokenizer(
        fast,
        _special(checkpoint, texts, fast.token_to_id, special_ids, padding.get("pad_id")),
        ChatTemplate(templates, texts, str(checkpoint.directory)),
        types=types,
        side=settings.get("truncation_side") or truncation.get("direction") or "right",
        clean_up=bool(settings.get("clean_up_tokenization_spaces")),
    )


def _special(
    checkpoint: Checkpoint, texts: dict[str, str], id_of: Any, special_ids: frozenset[int], pad_id: int | None = None
) -> SpecialTokens:
    config = checkpoint.json("config.json") or {}
    return SpecialTokens.of(
        texts, id_of, special_ids, eos_ids=_eos_ids(checkpoint), pad_ids=(config.get("pad_token_id"), pad_id)
    )


def _eos_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the end-of-sequence ids from generation_config.json, or else from config.json."""
    for name in ("generation_config.json", "config.json"):
        document = checkpoint.json(name) or {}
        inner = document.get("text_config")
        for config in (document, inner if isinstance(inner, dict) else {}):
            value = config.get("eos_token_id")
            ids = tuple(id for id in (value if isinstance(value, list) else [value]) if type(id) is int and id >= 0)
            if ids:
                return ids
    return ()
