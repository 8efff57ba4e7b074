"""Where another variant is faster than ``auto``: ``by_shape`` of ``conch.json``.

Pure.  ``conch convert`` decides it; the backend holds both variants and asks for every run which of them takes less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, log
from typing import Any, Final

from conch.lengths import on_grid

#: A variant that is expected to be faster by less runs nowhere: that much is within what figures vary by.
LEAST_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times faster a variant is than ``auto`` with ``batch`` sequences of ``tokens`` tokens each; 1 where the
    figures do not tell them apart."""

    batch: int
    tokens: int
    gain: float


@dataclass(frozen=True)
class Companion:
    """The variant that is held beside ``auto``, and run where it is the faster of the two.

    ``gains`` has every measured batch size with every measured length.  ``overall`` is how much faster both together
    are than ``auto`` alone, ``memory_bytes`` what is resident of a process with both (0: not measured); ``agreement``
    tells how close the answers of one are to those of the other: ``cosine_min`` and ``argmax``, None where that says
    nothing.  Raises ValueError for gains that are not such a table.
    """

    variant: str
    gains: tuple[Gain, ...]
    overall: float = 1.0
    memory_bytes: int = 0
    agreement: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._table.at(1, 1)

    def faster_at(self, rows: int, tokens: int) -> bool:
        """Whether it is the faster one for ``rows`` sequences of ``tokens`` tokens: at the shape that holds them in the
        grid, so that a batch has the same answer whether or not an engine pads it to that."""
        return self._table.at(*on_grid(rows, tokens)) >= LEAST_GAIN

    @cached_property
    def _table(self) -> ShapeTable:
        return ShapeTable({(gain.batch, gain.tokens): gain.gain for gain in self.gains})


class ShapeTable:
    """Positive numbers by batch size and tokens, and what is between them.

    Raises ValueError unless every batch size has a number with every length, for what can be in a batch.
    """

    def __init__(self, values: Mapping[tuple[int, int], float]) -> None:
        if min((side for shape in values for side in shape), default=1) < 1:
            raise ValueError("a table by shape needs a number for batch sizes and lengths of 1 at least")
        self._logs = {shape: log(value) for shape, value in values.items()}
        self._batches = sorted({batch for batch, _ in values})
        self._lengths = sorted({tokens for _, tokens in values})
        if not values or len(values) != len(self._batches) * len(self._lengths):
            raise ValueError("a table by shape needs a number for each batch size with each length")

    def at(self, rows: int, tokens: int) -> float:
        """The number there: between those around it, by the logarithms of all three; outside of them the nearest."""
        (top, bottom, down), (left, right, across) = _between(self._batches, rows), _between(self._lengths, tokens)
        above, below = (
            self._logs[batch, left] * (1 - across) + self._logs[batch, right] * across for batch in (top, bottom)
        )
        return exp(above * (1 - down) + below * down)


def _between(measured: Sequence[int], value: int) -> tuple[int, int, float]:
    """The measured values around ``value``, and how far it is from the first of them to the second, from 0 to 1."""
    above = bisect_right(measured, value)
    if above == 0 or above == len(measured):
        nearest = measured[max(0, above - 1)]
        return nearest, nearest, 0.0
    low, high = measured[above - 1], measured[above]
    return low, high, log(value / low) / log(high / low)
