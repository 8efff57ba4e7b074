"""Encodes texts as inputs of an encoder network, and rejects texts that are empty or too long.

Used by encoder tasks, on the thread that receives a request, and by ``conch convert``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.open import TYPES, open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import Side, TextTokenizer, Tokens, Truncation
from conch.core.errors import ConchError, invalid
from conch.core.text_parameters import MAX_LENGTH, REFUSE, TRUNCATION


class InputEncoder:
    """Encodes texts with ``tokenizer`` for a network that accepts at most ``max_length`` tokens.

    ``types`` is true if the network gets token types. Longer texts are rejected if ``refuse`` is true, otherwise
    truncated on ``side`` (None: the tokenizer's). Raises INVALID_ARG for a ``max_length`` that leaves no tokens for
    text.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        max_length: int,
        *,
        types: bool = True,
        refuse: bool = False,
        side: Side | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.types = types
        self.pad_id = tokenizer.special.pad_id or 0
        self.refuse = refuse
        self._side = side
        self.room()

    @property
    def side(self) -> Side:
        """The side on which long texts are truncated."""
        return self._side or self.tokenizer.side

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
        """Encode each text, or pair of texts; returns the tokens and the number of rows that were truncated.

        ``names`` are the input names in errors, and ``per_row`` is the number of texts per row. ``offsets`` applies
        only to single texts. Raises INVALID_ARG for a text without tokens, and for a text that is too long and must not
        or cannot be truncated.
        """
        first, second = f"input '{names[0]}'", f"input '{names[1]}'"
        limit = self.max_length
        if pairs is None:
            encoded = self.tokenizer.encode_texts(
                texts, limit, types=self.types, offsets=offsets, name=first, side=self._side
            )
        else:
            self.room(pair=True)
            encoded = self.tokenizer.encode_pairs(
                texts, pairs, limit, types=self.types, truncation=truncation, names=(first, second), side=self._side
            )
        items: list[Tokens] = []
        cut: set[int] = set()
        for index, tokens in enumerate(encoded):
            if not 0 < tokens.length <= limit:
                row = index // per_row
                if not tokens.length:
                    raise invalid(f"{first} has no tokens in row {row}; the model needs at least one")
                if self.refuse:
                    raise self._too_long(first, row, tokens.length)
                if pairs is not None and len(tokens.ids) > limit:
                    raise self._too_long(second, row, len(self.tokenizer.encode(pairs[index], special_tokens=False)))
                cut.add(row)
            items.append(tokens)
        return items, len(cut)

    def encode_rendered(self, texts: Sequence[str], ending: Sequence[int]) -> tuple[list[Tokens], int]:
        """Encode texts that contain their special tokens; returns the tokens and the number of truncated texts.

        A truncated text ends with the token ids ``ending``, as a whole one does. Raises INVALID_ARG for a text that
        cannot be tokenised, has no tokens, or is too long and must not be truncated.
        """
        items: list[Tokens] = []
        truncated = 0
        for row, text in enumerate(texts):
            ids = self.tokenizer.encode(text, special_tokens=False)
            length = len(ids)
            if not length:
                raise invalid(f"the texts of row {row} have no tokens; the model needs at least one")
            if length > self.max_length:
                if self.refuse:
                    raise self._too_long("the text of a pair", row, length)
                truncated += 1
                kept = list(ending[-self.max_length :])
                ids = [*ids[: self.max_length - len(kept)], *kept]
            items.append(Tokens(np.array(ids, np.int64), None, length))
        return items, truncated

    def limited(self, max_length: int) -> InputEncoder:
        """Return an encoder of the same tokenizer with another maximum length."""
        return InputEncoder(self.tokenizer, max_length, types=self.types, refuse=self.refuse)

    def requested(self, parameters: Mapping[str, Any]) -> InputEncoder:
        """Return an encoder for a request with these parameters.

        ``truncation`` is ``left``, ``right`` or ``refuse``; ``max_length`` lowers the maximum. Raises INVALID_ARG for
        other values, and for a ``max_length`` that leaves no tokens for text.
        """
        truncation, length = read_truncation(parameters)
        if truncation is None and length is None:
            return self
        side: Any = None if truncation == REFUSE else truncation
        return InputEncoder(
            self.tokenizer,
            min(length or self.max_length, self.max_length),
            types=self.types,
            refuse=truncation == REFUSE if truncation else self.refuse,
            side=side or self._side,
        )

    def room(self, *, pair: bool = False) -> int:
        """Return the maximum number of tokens of a text or pair, excluding special tokens.

        Raises INVALID_ARG if less than one token per text remains.
        """
        special = self.tokenizer.special_token_count(pair=pair)
        if self.max_length < special + (2 if pair else 1):
            raise too_short_error(self.max_length, special, pair=pair)
        return self.max_length - special

    def _too_long(self, name: str, row: int, length: int) -> ConchError:
        return too_long_error(name, row, length, self.max_length)


def read_truncation(parameters: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the parameters ``truncation`` and ``max_length`` of a request, each None if it is missing.

    Raises INVALID_ARG for other values than ``left``, ``right`` and ``refuse``, and a positive number.
    """
    truncation, length = parameters.get(TRUNCATION), parameters.get(MAX_LENGTH)
    if truncation not in (None, "left", "right", REFUSE):
        raise invalid(f"parameter '{TRUNCATION}' is '{truncation}'; it must be left, right or {REFUSE}")
    if length is not None and (type(length) is not int or length < 1):
        raise invalid(f"parameter '{MAX_LENGTH}' is '{length}'; it must be a whole number of at least 1")
    return truncation, length


def too_long_error(name: str, row: int, length: int, max_length: int) -> ConchError:
    """Return the error for the text ``name`` of a row that has more than ``max_length`` tokens and is not truncated."""
    return invalid(f"{name} has {length} tokens in row {row}; the model takes at most {max_length}")


def too_short_error(length: int, special: int, *, pair: bool = False) -> ConchError:
    """Return the error for a maximum ``length`` that leaves no room for tokens other than ``special`` special ones."""
    return invalid(
        f"max_length is {length} tokens, which leaves no room for text: the tokenizer puts {special} special tokens "
        f"around {'a pair of texts' if pair else 'a text'}, so it must be at least {special + 1 + pair}"
    )


def open_encoder(checkpoint: Checkpoint, original: Any = None) -> InputEncoder:
    """Open the tokenizer of a checkpoint for its network. Raises the errors of ``open_tokenizer``.

    ``original`` is the same tokenizer loaded by transformers. Its class may specify that the network gets no token
    types, which tokenizer_config.json may omit.
    """
    tokenizer = open_tokenizer(checkpoint)
    takes_types = tokenizer.types if original is None else TYPES in original.model_input_names
    # The network must not get types for which it has no embeddings.
    known = int(checkpoint.config.get("type_vocab_size") or 2) > 1
    return InputEncoder(
        tokenizer, checkpoint.max_length, types=takes_types and known, refuse=checkpoint.refuses_long_texts
    )
