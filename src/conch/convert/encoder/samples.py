"""Calibration data: encoded batches cut into single sequences without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from conch.backends.native.arrays import Array
from conch.errors import invalid

#: Enough to see the ranges of activations; more changes little and costs time.
SAMPLES: Final = 96


def samples(batches: Sequence[Mapping[str, Array]], most: int = SAMPLES) -> list[dict[str, Array]]:
    """At most ``most`` inputs of one row each, taken evenly from ``batches``; INVALID_ARG when there are none."""
    rows = [one for batch in batches for one in split(batch)]
    if not rows:
        raise invalid("there are no calibration texts")
    if len(rows) <= most:
        return rows
    return [rows[round(index)] for index in np.linspace(0, len(rows) - 1, most)]


def split(batch: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The rows of a batch, each ``[1, tokens]``, cut where its attention mask ends."""
    count = len(next(iter(batch.values())))
    mask = batch.get("attention_mask")
    rows = []
    for row in range(count):
        one = {name: values[row : row + 1] for name, values in batch.items()}
        if mask is not None:
            keep = mask[row] != 0
            one = {name: values[:, keep] if values.shape == (1, len(keep)) else values for name, values in one.items()}
        rows.append(one)
    return rows
