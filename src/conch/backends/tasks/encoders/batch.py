"""Pads token sequences to the arrays of one engine run.

Used by encoder tasks in the threads of the instances, and by the checks at load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.tokenizers.open import TYPES
from conch.checkpoints.tokenizers.tokenizer import Tokens


class PaddedBatch:
    """The sequences of one engine run and their requests, as INT64 ``ids`` and ``mask``.

    Both arrays are ``[rows, length]``: ``shape`` if given, else the number of sequences and the longest length.
    ``padded`` is true if any position is padding.
    """

    __slots__ = ("ids", "mask", "padded", "requests", "sequences")

    def __init__(
        self,
        sequences: Sequence[Tokens],
        requests: Sequence[Any],
        pad: int,
        shape: tuple[int, int] | None = None,
    ) -> None:
        """Pad at the end with the token ``pad``; the first sequence must be the longest."""
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
        self.mask[count:, 0] = 1  # avoids a division by zero in rows without tokens

    def without_padding_rows(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``outputs`` without the rows that are only padding; removes these rows from ``mask`` too."""
        count = len(self.sequences)
        self.mask = self.mask[:count]
        return {name: array[:count] for name, array in outputs.items()}

    def arrays(self, wanted: Collection[str], *, types: bool) -> dict[str, Array]:
        """Return the network's inputs; ``wanted`` has the input names of the network.

        ``types`` is true if the tokenizer produces token types. Without them ``token_type_ids`` is omitted, because
        zeros are not the default of every network.
        """
        arrays = {"input_ids": self.ids, "attention_mask": self.mask}
        if types and TYPES in wanted:
            arrays[TYPES] = self.types()
        if "position_ids" in wanted:
            arrays["position_ids"] = np.broadcast_to(np.arange(self.ids.shape[1]), self.ids.shape).copy()
        return arrays

    def types(self) -> Array:
        """Return INT64 ``token_type_ids``, 0 for padding."""
        types = np.zeros_like(self.ids)
        for row, sequence in enumerate(self.sequences):
            if sequence.types is not None:
                types[row, : len(sequence.types)] = sequence.types
        return types

    def rows(self, array: Array) -> list[Array]:
        """Return each sequence's part of ``[n, length, …]``, without padding."""
        return [array[row, : len(sequence.ids)] for row, sequence in enumerate(self.sequences)]
