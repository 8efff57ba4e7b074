"""Texts as the inputs of an encoder network: none empty, none longer than the network takes.

Used by the tasks over encoders, by whichever thread received a request, and by ``conch convert``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import TYPES, open_tokenizer
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer, Tokens, Truncation
from conch.errors import ConchError, invalid


class InputEncoder:
    """``tokenizer`` for a network that takes sequences of at most ``max_length`` tokens.

    ``types`` says whether the network is given the types of tokens, ``refuse`` whether longer texts are refused; else
    they are cut.  Raises INVALID_ARG for a maximum without room for text.
    """

    def __init__(self, tokenizer: TextTokenizer, max_length: int, *, types: bool = True, refuse: bool = False) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.types = types
        self.pad_id = tokenizer.special.pad_id or 0
        self._refuse = refuse
        self.room()

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
        INVALID_ARG for a text that gives no token, and for one beyond the maximum length where those are refused.
        ``offsets`` are those of single texts.
        """
        first, second = f"input '{names[0]}'", f"input '{names[1]}'"
        limit = self.max_length
        if pairs is None:
            encoded = self.tokenizer.encode_texts(texts, limit, types=self.types, offsets=offsets, name=first)
        else:
            self.room(pair=True)
            encoded = self.tokenizer.encode_pairs(
                texts, pairs, limit, types=self.types, truncation=truncation, names=(first, second)
            )
        items: list[Tokens] = []
        cut: set[int] = set()
        for index, tokens in enumerate(encoded):
            if not 0 < tokens.length <= limit:
                row = index // per_row
                if not tokens.length:
                    raise invalid(f"{first} gives no token in row {row}; the model needs one")
                if self._refuse:
                    raise self._too_long(first, row, tokens.length)
                if pairs is not None and len(tokens.ids) > limit:
                    raise self._too_long(second, row, len(self.tokenizer.encode(pairs[index], special_tokens=False)))
                cut.add(row)
            items.append(tokens)
        return items, len(cut)

    def room(self, *, pair: bool = False) -> int:
        """How many tokens of a text, or a pair, the network takes; INVALID_ARG where that is not one of each."""
        special = self.tokenizer.special_token_count(pair=pair)
        if self.max_length < special + (2 if pair else 1):
            raise no_room(self.max_length, special, pair=pair)
        return self.max_length - special

    def _too_long(self, name: str, row: int, length: int) -> ConchError:
        return invalid(f"{name} has {length} tokens in row {row}; the model takes at most {self.max_length}")


def no_room(length: int, special: int, *, pair: bool = False) -> ConchError:
    """The error for a maximum of ``length`` tokens that ``special`` ones take up."""
    return invalid(
        f"max_length is {length}, and the tokenizer puts {special} special tokens around "
        f"{'a pair of texts' if pair else 'a text'}: set parameter 'max_length' to {special + 1 + pair} at least"
    )


def open_encoder(checkpoint: Checkpoint, options: Options, original: Any = None) -> InputEncoder:
    """The tokenizer of a checkpoint for its network.  Raises INVALID_ARG or UNSUPPORTED, as ``open_tokenizer``.

    ``original`` is the same as transformers loads it: its class may know what tokenizer_config.json leaves out, that
    the network is given no types of tokens.
    """
    tokenizer = open_tokenizer(checkpoint)
    given = tokenizer.types if original is None else TYPES in original.model_input_names
    # Types beyond those that the network has embeddings for must not reach it.
    known = int(checkpoint.config.get("type_vocab_size") or 2) > 1
    return InputEncoder(tokenizer, checkpoint.max_length, types=given and known, refuse=options.truncation == "refuse")
