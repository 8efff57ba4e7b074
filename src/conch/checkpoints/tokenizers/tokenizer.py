"""The tokenizer interface for tasks, language models and ``conch convert``.

In a worker, one thread encodes requests while other threads decode. An open tokenizer therefore never changes:
truncation and padding are off, and callers request truncation in each call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from conch.checkpoints.tokenizers.chat import ChatTemplate
from conch.checkpoints.tokenizers.special_tokens import SpecialTokens
from conch.checkpoints.tokenizers.stream import TextStream
from conch.core.errors import ConchError, invalid, one_line

#: Texts per tokenizer call; limits memory, because the encodings of a call are freed before the next call.
CHUNK: Final = 1024
#: Which text of a pair is truncated: the longer one, or the first.
Truncation = Literal["longest", "first"]
#: INT64 ``[length]``.
Ids = npt.NDArray[np.int64]


class Tokens:
    """A token sequence for a network: INT64 ``ids`` and ``types`` of the same length.

    ``types`` is None if all are 0. ``length`` is the length before truncation. If requested, ``offsets`` has the
    character range (start, end) of each token, and ``special`` is 1 for tokens that are not part of the text.
    """

    __slots__ = ("ids", "length", "offsets", "special", "types")

    def __init__(self, ids: Ids, types: Ids | None = None, length: int = -1) -> None:
        self.ids = ids
        self.types = types
        self.length = len(ids) if length < 0 else length
        self.offsets: list[tuple[int, int]] = []
        self.special: list[int] = []


class TextTokenizer(ABC):
    """Converts texts and conversations to token ids, and token ids to text.

    ``vocabulary`` is the number of tokens, including added tokens. ``types`` is true if the network gets token types
    (``token_type_ids``). ``fast`` is the tokenizer of ``tokenizers``; None for a tokenizer written in Python, which
    does not support offsets.
    """

    special: SpecialTokens
    template: ChatTemplate
    vocabulary: int
    types: bool
    fast: Any

    @abstractmethod
    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encode a text, by default with the model's special tokens around it.

        Raises INVALID_ARG for a text that cannot be tokenised.
        """

    @abstractmethod
    def encode_texts(
        self, texts: Sequence[str], limit: int, *, types: bool = False, offsets: bool = False, name: str = "the text"
    ) -> Iterator[Tokens]:
        """Encode each text with special tokens, truncated to ``limit`` tokens. Raises INVALID_ARG, naming ``name``."""

    @abstractmethod
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
        """Encode each pair with special tokens, truncated to ``limit`` tokens.

        A pair is not truncated if only the first text may be and the second alone is too long. Raises INVALID_ARG for a
        text that cannot be tokenised, naming it from ``names``.
        """

    @abstractmethod
    def special_token_count(self, *, pair: bool) -> int:
        """Return the number of special tokens that are added to a text or a pair of texts."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, clean_up: bool = False) -> str:
        """Decode ids to text; unknown ids are ignored.

        ``clean_up`` removes spaces if tokenizer_config.json requests it, as transformers does by default.
        """

    @abstractmethod
    def token(self, id: int) -> str:
        """Return a token as written in the vocabulary."""

    @abstractmethod
    def join(self, tokens: Sequence[str]) -> str:
        """Convert tokens as written in the vocabulary to text."""

    @abstractmethod
    def piece(self, id: int) -> str:
        """Return the text of a token in the middle of a text; includes special tokens."""

    @abstractmethod
    def stream(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> TextStream:
        """Open a stream that converts ids to text as they arrive; ``after`` are preceding ids, whose text is omitted.

        Without ``after`` the ids begin a text; SentencePiece then drops the space before the first word.
        """

    def chat(self, messages: Any, *, tools: Any = None, **variables: Any) -> str:
        """Render a conversation to a prompt; see :meth:`ChatTemplate.render`.

        The prompt includes special tokens, so encode it with ``special_tokens=False``.
        """
        return self.template.render(messages, tools, **variables)


def refused(error: BaseException, name: str) -> ConchError:
    """Return INVALID_ARG for a text that cannot be tokenised; ``name`` is the text's name in the message.

    Callers catch BaseException, because a Rust panic is not an Exception and must fail only one request. Raises
    KeyboardInterrupt and SystemExit again.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return invalid(f"{name} cannot be tokenised: {one_line(error)}")
