"""Texts to token ids and back, with the tokenizer of a checkpoint.

Used by the tasks of text: ``encode`` by whichever thread received a request, the rest by the threads of
the instances.  A tokenizer is never changed after construction (truncation and padding are off), so
that threads share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Literal

from tokenizers import Tokenizer

from conch.backends.native.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import ConchError, invalid

#: Texts that are tokenised in one call: what their encodings take is given back before the next.
CHUNK: Final = 1024

#: Which of a pair is shortened: the longer one, or the first.
Truncation = Literal["longest", "first"]


class Tokens:
    """One sequence for the network: INT64 ``ids`` and ``types`` of the same length.

    ``types`` is None where all are 0.  Where they were asked for, ``offsets`` are the characters of each token (start,
    end) and ``special`` is 1 for tokens that are not of the text.
    """

    __slots__ = ("ids", "offsets", "special", "types")

    def __init__(self, ids: Array, types: Array | None = None) -> None:
        self.ids = ids
        self.types = types
        self.offsets: list[tuple[int, int]] = []
        self.special: list[int] = []


class Encoder(ABC):
    """What tasks know of a tokenizer.  The ids of special tokens are None where a tokenizer has none."""

    max_length: int
    pad_id: int
    unknown_id: int | None
    mask_id: int | None
    cls_id: int | None
    #: The tokenizer of ``tokenizers``; None where only Python's exists, which knows no offsets.
    fast: Tokenizer | None

    def __init__(self, checkpoint: Checkpoint, options: Options) -> None:
        self.max_length = checkpoint.max_length
        self.refuse = options.truncation == "refuse"
        # Types beyond those that the network has embeddings for must not reach it.
        self.typed = int(checkpoint.config.get("type_vocab_size") or 2) > 1

    @abstractmethod
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
        """Each text, or text and pair, as the network wants it, and how many rows had to be shortened.

        ``names`` are the inputs that messages name, ``per_row`` how many texts each of their rows gave.  Raises
        INVALID_ARG for a text that gives no token, and for one beyond the maximum length where options say so.
        ``offsets`` are those of single texts.
        """

    @abstractmethod
    def special_tokens(self, *, pair: bool) -> int:
        """How many special tokens are put around a text, or a pair of texts."""

    @abstractmethod
    def token(self, id: int) -> str:
        """A token as the vocabulary has it."""

    @abstractmethod
    def join(self, tokens: Sequence[str]) -> str:
        """Tokens of the vocabulary as text."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Ids as text."""

    def room(self, *, pair: bool = False) -> int:
        """How many tokens of a text, or a pair, the network takes; INVALID_ARG where that is not one of each."""
        special = self.special_tokens(pair=pair)
        if self.max_length < special + (2 if pair else 1):
            raise no_room(self.max_length, special, pair=pair)
        return self.max_length - special

    def too_long(self, name: str, row: int, length: int) -> ConchError:
        return invalid(f"input '{name}' has {length} tokens in row {row}; the model takes at most {self.max_length}")

    @staticmethod
    def empty(name: str, row: int) -> ConchError:
        return invalid(f"input '{name}' gives no token in row {row}; the model needs one")


def no_room(length: int, special: int, *, pair: bool = False) -> ConchError:
    """What a maximum of ``length`` tokens is refused with that ``special`` ones take up."""
    return invalid(
        f"max_length is {length}, and the tokenizer puts {special} special tokens around "
        f"{'a pair of texts' if pair else 'a text'}: set parameter 'max_length' to {special + 1 + pair} at least"
    )


def open_encoder(checkpoint: Checkpoint, options: Options) -> Encoder:
    """The tokenizer of a checkpoint: ``tokenizer.json``, or what transformers makes of its other files."""
    path = checkpoint.path("tokenizer.json")
    if path is not None:
        from conch.checkpoints.tokenizers.fast import FastEncoder

        try:
            return FastEncoder(checkpoint, options, Tokenizer.from_file(str(path)))
        except ConchError:
            raise
        except Exception as error:
            raise invalid(f"the tokenizer of '{checkpoint.source}' cannot be read: tokenizer.json: {error}") from None
    from conch.checkpoints.tokenizers.slow import open_with_transformers

    return open_with_transformers(checkpoint, options)
