"""Token sequences as the arrays of one run of an engine.

Made by the tasks over encoders, in the threads of the instances, and by the trial at load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.tokenizers.open import TYPES
from conch.checkpoints.tokenizers.tokenizer import Tokens


class PaddedBatch:
    """The sequences of one run of the engine, with the request of each, as INT64 ``ids`` and ``mask``.

    Both arrays are ``[rows, length]``: ``shape``, or that of the sequences themselves.  ``padded`` says whether any
    place is padding.
    """

    __slots__ = ("ids", "mask", "padded", "requests", "sequences")

    def __init__(
        self,
        sequences: Sequence[Tokens],
        requests: Sequence[Any],
        pad: int,
        shape: tuple[int, int] | None = None,
    ) -> None:
        """Pad at the end with ``pad``; the first of ``sequences`` is the longest."""
        self.sequences = sequences
        self.requests = requests
        count = len(sequences)
        rows, length = shape or (count, len(sequences[0].ids))
        flat = np.concatenate([sequence.ids for sequence in sequences]) if count > 1 else sequences[0].ids
        self.padded = len(flat) != rows * length
        if not self.padded:
            self.ids = flat.reshape(rows, length)
            self.mask = np.ones((rows, length), np.int64)
            return
        lengths = np.array([len(sequence.ids) for sequence in sequences])
        real = np.zeros((rows, length), np.bool_)
        real[:count] = np.arange(length) < lengths[:, None]
        self.ids = np.full((rows, length), pad, np.int64)
        self.ids[real] = flat
        self.mask = real.astype(np.int64)
        self.mask[count:, 0] = 1  # a row without any token would be divided by the sum of nothing

    def without_padding_rows(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """``outputs`` without the rows, which ``mask`` forgets too, that are nothing but padding."""
        count = len(self.sequences)
        self.mask = self.mask[:count]
        return {name: array[:count] for name, array in outputs.items()}

    def arrays(self, wanted: Collection[str], *, types: bool) -> dict[str, Array]:
        """What the network is given, of which ``wanted`` are the names that it takes.

        ``types``: the tokenizer gives the types of tokens; some networks take others than no types for words.
        """
        arrays = {"input_ids": self.ids, "attention_mask": self.mask}
        if types and TYPES in wanted:
            arrays[TYPES] = self.types()
        if "position_ids" in wanted:
            arrays["position_ids"] = np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape).copy()
        return arrays

    def types(self) -> Array:
        """INT64 ``token_type_ids``, 0 for padding."""
        types = np.zeros_like(self.ids)
        for row, sequence in enumerate(self.sequences):
            if sequence.types is not None:
                types[row, : len(sequence.types)] = sequence.types
        return types

    def rows(self, array: Array) -> list[Array]:
        """Each sequence's part of ``[n, length, …]``, without padding."""
        return [array[row, : len(sequence.ids)] for row, sequence in enumerate(self.sequences)]
