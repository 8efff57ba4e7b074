"""The tokenizer of a checkpoint, as tasks, language models and ``conch convert`` know it.

In a worker the thread that receives requests encodes while others decode, so nothing here changes once it is open:
truncation and padding are off, and whoever needs them says so in each call.
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
from conch.errors import ConchError, invalid, one_line

#: Texts that are tokenised in one call: what their encodings take is given back before the next.
CHUNK: Final = 1024
#: Which of a pair is shortened: the longer one, or the first.
Truncation = Literal["longest", "first"]
#: INT64 ``[length]``.
Ids = npt.NDArray[np.int64]


class Tokens:
    """One sequence for a network: INT64 ``ids`` and ``types`` of the same length.

    ``types`` is None where all are 0.  ``length`` is that before it was cut.  Where they were asked for, ``offsets``
    are the characters of each token (start, end), and ``special`` is 1 for tokens that are not of the text.
    """

    __slots__ = ("ids", "length", "offsets", "special", "types")

    def __init__(self, ids: Ids, types: Ids | None = None, length: int = -1) -> None:
        self.ids = ids
        self.types = types
        self.length = len(ids) if length < 0 else length
        self.offsets: list[tuple[int, int]] = []
        self.special: list[int] = []


class TextTokenizer(ABC):
    """Texts and conversations to token ids, and token ids to text.

    ``vocabulary`` is the number of tokens, added ones included.  ``types`` says whether the network is given the types
    of tokens (``token_type_ids``).  ``fast`` is the tokenizer of ``tokenizers``; None for one that is written in
    Python, which knows no offsets.
    """

    special: SpecialTokens
    template: ChatTemplate
    vocabulary: int
    types: bool
    fast: Any

    @abstractmethod
    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the tokens that the model expects around one.  Raises INVALID_ARG."""

    @abstractmethod
    def encode_texts(
        self, texts: Sequence[str], limit: int, *, types: bool = False, offsets: bool = False, name: str = "the text"
    ) -> Iterator[Tokens]:
        """Each text with special tokens around it, cut to ``limit`` tokens.  Raises INVALID_ARG, naming ``name``."""

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
        """Each pair with special tokens around it, cut to ``limit`` tokens.

        A pair that cannot be, since the second text alone is too long and only the first may be shortened, is given
        whole.  Raises INVALID_ARG, naming the one of ``names`` that cannot be tokenised.
        """

    @abstractmethod
    def special_token_count(self, *, pair: bool) -> int:
        """How many special tokens are put around a text, or a pair of texts."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, clean_up: bool = False) -> str:
        """The text of ids; those that are none of the tokenizer's add nothing.

        ``clean_up`` removes the spaces that tokenizer_config.json wants removed, as transformers does by default.
        """

    @abstractmethod
    def token(self, id: int) -> str:
        """A token as the vocabulary has it."""

    @abstractmethod
    def join(self, tokens: Sequence[str]) -> str:
        """Tokens of the vocabulary as text."""

    @abstractmethod
    def piece(self, id: int) -> str:
        """The text of one token, in the middle of a text; special ones are shown."""

    @abstractmethod
    def stream(self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> TextStream:
        """A stream that turns ids into text as they come; ``after`` are ids before them, whose text is left out.

        Without ``after`` a text begins, which with SentencePiece drops the space before its first word.
        """

    def chat(self, messages: Any, *, tools: Any = None, **variables: Any) -> str:
        """A conversation as a prompt, which has its special tokens: encode it without.  Raises INVALID_ARG."""
        return self.template.render(messages, tools, **variables)


def refused(error: BaseException, name: str) -> ConchError:
    """INVALID_ARG for a text that a tokenizer cannot take; ``name`` is how the message calls the text.

    To be raised for a BaseException: a panic in Rust is no Exception, and no more than one request's fault.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return invalid(f"{name} cannot be tokenised: {one_line(error)}")
