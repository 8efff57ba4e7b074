"""Selects between two variants by the shape of a batch: ``by_shape`` in ``conch.json``.

Pure functions. ``conch convert`` measures the gains; the backend loads both variants and runs the faster one for each
shape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, log
from typing import Any, Final

from conch.core.lengths import on_grid

#: The minimum gain for which the other variant runs; smaller gains are within the variation of measurements.
LEAST_GAIN: Final = 1.05


@dataclass(frozen=True, slots=True)
class Gain:
    """The speedup of a variant over ``auto`` for ``batch`` sequences of ``tokens`` tokens each.

    It is 1 if the difference is within the variation of the measurements.
    """

    batch: int
    tokens: int
    gain: float


@dataclass(frozen=True)
class Companion:
    """The variant that is loaded in addition to ``auto`` and runs the shapes for which it is faster.

    ``gains`` has a gain for each combination of measured batch size and length. ``overall`` is the speedup of both
    variants together over ``auto`` alone. ``memory_bytes`` is the resident memory of a process with both (0: not
    measured). ``agreement`` compares the outputs of the two variants: ``cosine_min`` and ``argmax``, None if not
    meaningful. Raises ValueError if ``gains`` is not a complete table.
    """

    variant: str
    gains: tuple[Gain, ...]
    overall: float = 1.0
    memory_bytes: int = 0
    agreement: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._table.at(1, 1)

    def faster_at(self, rows: int, tokens: int) -> bool:
        """Whether this variant is the faster one for ``rows`` sequences of ``tokens`` tokens.

        Rounds the shape up to the padding grid, so that the choice does not depend on whether an engine pads.
        """
        return self._table.at(*on_grid(rows, tokens)) >= LEAST_GAIN

    @cached_property
    def _table(self) -> ShapeTable:
        return ShapeTable({(gain.batch, gain.tokens): gain.gain for gain in self.gains})


class ShapeTable:
    """A table of positive numbers by batch size and tokens, with interpolation.

    Raises ValueError unless each combination of batch size and length has a number, and all sizes are at least 1.
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
        """Return the number at a shape: interpolated on logarithmic scales, or the nearest number outside the table."""
        (top, bottom, down), (left, right, across) = _between(self._batches, rows), _between(self._lengths, tokens)
        above, below = (
            self._logs[batch, left] * (1 - across) + self._logs[batch, right] * across for batch in (top, bottom)
        )
        return exp(above * (1 - down) + below * down)


def _between(measured: Sequence[int], value: int) -> tuple[int, int, float]:
    """Return the two measured values around ``value``, and its relative position between them from 0 to 1."""
    above = bisect_right(measured, value)
    if above == 0 or above == len(measured):
        nearest = measured[max(0, above - 1)]
        return nearest, nearest, 0.0
    low, high = measured[above - 1], measured[above]
    return low, high, log(value / low) / log(high / low)
