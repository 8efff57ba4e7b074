"""Checks a network with example texts when its task is loaded: missing weights, and rows that may share a run.

In some networks padding changes the outputs, because they ignore the attention mask or apply it incompletely. Others
fail on several rows. No file of a checkpoint specifies this, so it is measured.
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
from conch.core.errors import invalid, one_line

#: Two example texts. In a batch with the long text, the row of the short text is mostly padding.
SHORT: Final = "Where is the nearest library?"
LONG: Final = (
    "A program takes a list of numbers and returns the even ones, 2 and 4 of 1 to 5, while the bus to the station is "
    "late and nobody knows why it is open in the morning."
)
#: Padding counts as harmful if it changes a row by more than this many times the effect of a second row.
_MORE: Final = 4.0


class Sharing(Enum):
    """Which sequences may share a run: all (with padding), those of equal length, or none."""

    PADDED = "padded"
    EQUAL = "equal lengths"
    ALONE = "alone"


def strictest(sharings: Sequence[Sharing]) -> Sharing:
    """Return the strictest result of several engines."""
    return max(sharings, key=list(Sharing).index)


class Examples:
    """Example texts (or pairs of a text with itself) for ``engine``, encoded by ``encoder``."""

    def __init__(self, engine: NetworkEngine, encoder: InputEncoder, *, pair: bool) -> None:
        self._engine = engine
        self._encoder = encoder
        self._pair = pair
        self._bound = rounding(engine.precision)
        self._short = self._encoded(SHORT, encoder.max_length)

    def require_tensors(self) -> None:
        """Raise INVALID_ARG, naming the weights, if outputs depend on missing weights."""
        self._engine.require_tensors(self._arrays([self._short]))

    def sharing(self) -> Sharing:
        """Determine which rows may share a run without changing their outputs."""
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
        """Raise INVALID_ARG if tokens or outputs differ from transformers; ``tokenizer`` is that of transformers."""
        texts = [SHORT, SHORT] if self._pair else [SHORT]
        encoding = tokenizer(*texts, truncation=True, max_length=self._encoder.max_length)
        ids = self._short.ids.tolist()
        if list(encoding["input_ids"]) != ids:
            raise unlike(f"'{SHORT}' is {encoding['input_ids']} to its tokenizer, and {ids} by tokenizer.json")
        arrays = {name: np.array([values]) for name, values in encoding.items()}
        outputs, wanted = self._alone, self._engine.reference(arrays)
        require_likeness(outputs, wanted, self._engine.precision, f"for '{SHORT}'")

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
        """Return the change in the output of the short text if two ``sequences`` share a run, relative to its maximum.

        Infinite if the two cannot run together.
        """
        row = next(index for index, sequence in enumerate(sequences) if sequence is self._short)
        try:
            outputs = self._run(sequences)
            return max(distance(alone[name][0], array[row]) for name, array in outputs.items())
        except Exception:  # networks that accept only one row or one length raise many types
            return float("inf")
