"""What a few examples tell of a network before it serves: whether it has its weights, and which rows may share a run.

Some networks have no mask, or one that leaks: what they say of a text changes with the padding behind it.  Others
refuse several rows.  Which do is found out, as no file says it.  Called when a task is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.base.likeness import unlike
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.engines.base import NetworkEngine
from conch.backends.tasks.likeness import distance, require_likeness, rounding
from conch.checkpoints.tokenizers.inputs import InputEncoder
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.errors import invalid, one_line

#: A text, and one so much longer that the first is mostly padding beside it.
SHORT: Final = "Where is the nearest library?"
LONG: Final = (
    "A program takes a list of numbers and returns the even ones, 2 and 4 of 1 to 5, while the bus to the station is "
    "late and nobody knows why it is open in the morning."
)
#: How much more than its neighbours padding must move a row before it is to blame.
_MORE: Final = 4.0


class Sharing(Enum):
    """Which sequences may share a run: any, padded; those of one length; none."""

    PADDED = "padded"
    EQUAL = "equal lengths"
    ALONE = "alone"


def strictest(found: Sequence[Sharing]) -> Sharing:
    """What holds for engines of which each was found to allow this much."""
    return max(found, key=list(Sharing).index)


class Examples:
    """A few texts, or pairs of a text with itself, for ``engine`` as ``encoder`` gives them to it."""

    def __init__(self, engine: NetworkEngine, encoder: InputEncoder, *, pair: bool) -> None:
        self._engine = engine
        self._encoder = encoder
        self._pair = pair
        self._bound = rounding(engine.precision)
        self._short = self._encoded(SHORT, encoder.max_length)

    def require_tensors(self) -> None:
        """Raise INVALID_ARG, naming them, if answers depend on weights that are missing."""
        self._engine.require_tensors(self._arrays([self._short]))

    def sharing(self) -> Sharing:
        """Which rows may share a run so that each gets the answer that it gets alone."""
        alone = self._alone
        long, other = self._encoded(LONG, self._encoder.max_length), self._encoded(LONG, len(self._short.ids))
        beside = self._moved(alone, [self._short, other])
        if beside > self._bound:
            return Sharing.ALONE
        if len(long.ids) > len(self._short.ids):
            padded = self._moved(alone, [long, self._short])
            if padded > max(self._bound, _MORE * beside):
                return Sharing.EQUAL
        return Sharing.PADDED

    def require_likeness(self, tokenizer: Any) -> None:
        """Raise INVALID_ARG if tokens or answer are not those of transformers, whose ``tokenizer`` it is."""
        texts = [SHORT, SHORT] if self._pair else [SHORT]
        given = tokenizer(*texts, truncation=True, max_length=self._encoder.max_length)
        ids = self._short.ids.tolist()
        if list(given["input_ids"]) != ids:
            raise unlike(f"'{SHORT}' is {given['input_ids']} to its tokenizer, and {ids} by tokenizer.json")
        arrays = {name: np.array([values]) for name, values in given.items()}
        found, wanted = self._alone, self._engine.reference(arrays)
        require_likeness(found, wanted, self._engine.precision, f"for '{SHORT}'")

    def _encoded(self, text: str, limit: int) -> Tokens:
        tokenizer, types = self._encoder.tokenizer, self._encoder.types
        if self._pair:
            return next(iter(tokenizer.encode_pairs([text], [text], limit, types=types)))
        return next(iter(tokenizer.encode_texts([text], limit, types=types)))

    def _arrays(self, sequences: Sequence[Tokens]) -> dict[str, Array]:
        batch = PaddedBatch(sequences, (), self._encoder.pad_id)
        return batch.arrays(self._engine.inputs, types=self._encoder.types)

    @cached_property
    def _alone(self) -> dict[str, Array]:
        try:
            return self._run([self._short])
        except Exception as error:
            raise invalid(f"the network does not answer to '{SHORT}': {one_line(error)}") from error

    def _run(self, sequences: Sequence[Tokens]) -> dict[str, Array]:
        return self._engine.run(self._arrays(sequences))

    def _moved(self, alone: Mapping[str, Array], sequences: Sequence[Tokens]) -> float:
        """How far the answer to the short text moves in a run of two ``sequences``, as a part of its greatest number.

        Infinite where both cannot run at once.
        """
        row = next(index for index, sequence in enumerate(sequences) if sequence is self._short)
        try:
            found = self._run(sequences)
            return max(distance(alone[name][0], array[row]) for name, array in found.items())
        except Exception:  # whatever a network raises that takes one row at a time, or one length
            return float("inf")
