"""The tokenizer of a text model: texts and conversations to ids, ids to text.

In a worker the thread that reads requests encodes while the engine's decodes, so nothing here changes once it is open.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from conch.checkpoints.tokenizers.chat import ChatTemplate, read_file, templates_of
from conch.checkpoints.tokenizers.special_tokens import ROLES, complete_special, content
from conch.checkpoints.tokenizers.stream import (
    BytePieces,
    ByteStream,
    PieceStream,
    TextPieces,
    TextStream,
    WindowStream,
)
from conch.checkpoints.tokenizers.stream import pieces_of as pieces_of_tokenizer
from conch.errors import invalid, one_line, unsupported

__all__ = ["FastTextTokenizer", "TextStream", "TextTokenizer", "open_tokenizer"]


class TextTokenizer(ABC):
    """What a text model knows of its tokenizer.

    ``eos_ids`` end a text (what generation_config.json says, config.json or the tokenizer), ``special_ids`` are not
    part of one.  ``vocabulary`` is the number of tokens, added ones included.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    vocabulary: int
    special_ids: frozenset[int]
    template: ChatTemplate

    @property
    def has_chat_template(self) -> bool:
        return bool(self.template)

    @abstractmethod
    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the tokens that the model expects around one.  Raises INVALID_ARG."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; those that are none of the tokenizer's add nothing."""

    @abstractmethod
    def piece(self, id: int) -> str:
        """The text of one token, in the middle of a text; special ones are shown."""

    @abstractmethod
    def stream(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> TextStream:
        """What turns ids into text as they come; ``after`` are ids before them, whose text it does not give.

        Without ``after`` a text begins, which with SentencePiece drops the space before its first word.
        """

    def chat(self, messages: Any, *, tools: Any = None, **variables: Any) -> str:
        """A conversation as a prompt, which has its special tokens: encode it without.  Raises INVALID_ARG."""
        return self.template.render(messages, tools, **variables)


class FastTextTokenizer(TextTokenizer):
    """A tokenizer of ``tokenizers``; the GIL is free while it encodes."""

    def __init__(self, fast: Any, template: ChatTemplate, special: frozenset[int]) -> None:
        self.fast = fast
        self.template = template
        self.vocabulary = fast.get_vocab_size(with_added_tokens=True)
        self.special_ids = special
        self._shown = pieces_of_tokenizer(fast)
        self._skipped = pieces_of_tokenizer(fast, special) if self._shown is not None else None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        with _refusing():
            encodings = self.fast.encode_batch_fast([text], add_special_tokens=special_tokens)
            ids: list[int] = encodings[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def piece(self, id: int) -> str:
        return self._shown.text(id) if self._shown is not None else self.decode([id], skip_special_tokens=False)

    def stream(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> TextStream:
        stream: TextStream
        match self._skipped if skip_special_tokens else self._shown:
            case BytePieces() as pieces:
                stream = ByteStream(pieces)
            case TextPieces() as pieces:
                stream = PieceStream(pieces)
            case _:
                stream = WindowStream(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))
        if after:
            stream.add(after)
        return stream


class SlowTextTokenizer(TextTokenizer):
    """A tokenizer that transformers has in Python only, for one thread at a time."""

    def __init__(self, slow: Any, template: ChatTemplate) -> None:
        self._slow = slow
        self._lock = Lock()
        self.template = template
        self.vocabulary = len(slow)
        self.special_ids = frozenset(int(id) for id in slow.all_special_ids)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        with self._lock, _refusing():
            ids: list[int] = self._slow(text, add_special_tokens=special_tokens, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with self._lock:
            return str(
                self._slow.decode(
                    list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
                )
            )

    def piece(self, id: int) -> str:
        return self.decode([id], skip_special_tokens=False)

    def stream(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> TextStream:
        stream = WindowStream(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))
        if after:
            stream.add(after)
        return stream


def open_tokenizer(
    directory: Path, *, gguf: Path | None = None, trust_remote_code: bool = False, chat_template: Path | None = None
) -> TextTokenizer:
    """The tokenizer of a checkpoint's folder, or of a GGUF file; ``chat_template`` is a file that replaces its own.

    Raises INVALID_ARG for files that cannot be read, UNSUPPORTED where a library is missing.
    """
    if gguf is not None:
        from conch.checkpoints.gguf.tokenizer import open_gguf_tokenizer

        opened: TextTokenizer = open_gguf_tokenizer(gguf)
    else:
        opened = _open_folder(directory, trust_remote_code)
    if chat_template is not None:
        opened.template.templates = read_file(chat_template)
    return opened


def _open_folder(directory: Path, trust_remote_code: bool) -> TextTokenizer:
    settings = _json_of(directory / "tokenizer_config.json")
    special = {**_json_of(directory / "special_tokens_map.json"), **settings}
    tokens = {role: text for role in ROLES if (text := content(special.get(role)))}
    source = str(directory)
    opened: TextTokenizer
    number: Callable[[str], int | None]
    if (directory / "tokenizer.json").is_file():
        fast = load_fast(directory / "tokenizer.json")
        number = fast.token_to_id
        ids = complete_special(fast, special, tokens)
        opened = FastTextTokenizer(fast, ChatTemplate(templates_of(directory, settings), tokens, source), ids)
    else:
        loaded = _with_transformers(directory, trust_remote_code)
        number = loaded.convert_tokens_to_ids
        tokens |= {role: str(own) for role in ROLES if (own := getattr(loaded, role, None))}
        template = ChatTemplate(templates_of(directory, settings), tokens, source)
        if getattr(loaded, "is_fast", False):
            fast = loaded.backend_tokenizer
            fast.no_truncation()
            fast.no_padding()
            opened = FastTextTokenizer(fast, template, frozenset(int(id) for id in loaded.all_special_ids))
        else:
            opened = SlowTextTokenizer(loaded, template)
    ids_of = {role: number(text) for role, text in tokens.items()}
    opened.eos_ids = _ends(directory) or tuple(id for id in (ids_of.get("eos_token"),) if id is not None)
    opened.bos_id, opened.pad_id = ids_of.get("bos_token"), ids_of.get("pad_token")
    return opened


def load_fast(path: Path) -> Any:
    """A tokenizer.json, without truncation and padding.  Raises INVALID_ARG for one that cannot be understood."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise unsupported(f'{path} needs tokenizers: pip install "conch[huggingface]"') from None
    try:
        fast: Any = Tokenizer.from_file(str(path))
    except Exception as error:
        raise invalid(f"{path} cannot be read: {one_line(error)}") from None
    fast.no_truncation()
    fast.no_padding()
    return fast


def _ends(directory: Path) -> tuple[int, ...]:
    """The ids that end a text, as the first file that has any says."""
    for name in ("generation_config.json", "config.json"):
        document = _json_of(directory / name)
        inner = document.get("text_config")
        for one in (document, inner if isinstance(inner, dict) else {}):
            value = one.get("eos_token_id")
            ids = tuple(id for id in (value if isinstance(value, list) else [value]) if type(id) is int and id >= 0)
            if ids:
                return ids
    return ()


def _with_transformers(directory: Path, trust_remote_code: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise unsupported(
            f'{directory} has no tokenizer.json, and its tokenizer needs transformers: pip install "conch[huggingface]"'
        ) from None
    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise invalid(f"{directory} has no tokenizer that transformers can load: {one_line(error)}") from None
    return loaded


@contextmanager
def _refusing() -> Iterator[None]:
    """INVALID_ARG for a text that a tokenizer cannot take."""
    try:
        yield
    except BaseException as error:
        # A panic in Rust is no Exception, and no more than one request's fault.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise invalid(f"the text cannot be tokenised: {one_line(error)}") from None


def _json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty without one.  Raises INVALID_ARG for anything else."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise invalid(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(document, dict):
        raise invalid(f"{path} must hold a JSON object")
    return document
