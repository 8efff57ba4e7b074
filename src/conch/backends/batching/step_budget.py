"""Limits the prompt tokens that a step reads. No I/O: durations are arguments.

A step without decoding sequences may read as many tokens as the decoder accepts. Reading delays the next tokens of
decoding sequences, so with them, a step takes at most ``STEP_RATIO`` times as long as one that only decodes. The
duration of such a step and the cost of a prompt token are learned from earlier steps.
"""

from __future__ import annotations

from typing import Final

#: The duration of a step that decodes and reads, relative to one that only decodes.
STEP_RATIO: Final = 2.5
#: A step reads at least this many tokens, so that prompts progress beside any number of decoding sequences.
FLOOR: Final = 16
#: The weight of a new measurement.
_WEIGHT: Final = 0.2
#: A measurement counts at most this many times the average, so that one delay by the machine has little effect.
_OUTLIER: Final = 2.0
#: After this many steps that decode and read, a step only decodes, to measure its duration again.
_INTERVAL: Final = 64


class StepBudget:
    """Learns durations of steps; ``limit`` is the maximum number of prompt tokens in a step."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: The average duration of a step that only decodes, by its number of sequences (s).
        self._decode: dict[int, float] = {}
        #: The average cost of a prompt token beside decoding sequences (s).
        self._token = 0.0
        self._since_decode = 0

    def tokens(self, rows: int) -> int:
        """Return how many prompt tokens to read in a step that decodes ``rows`` sequences."""
        if not rows:
            return self._limit
        nearest = self._nearest(rows)
        if self._since_decode >= _INTERVAL or not rows / 2 <= nearest <= rows * 2:
            return 0
        extra = (STEP_RATIO - 1) * self._decode_seconds(rows, nearest)
        affordable = int(extra / self._token) if self._token else FLOOR
        return min(max(affordable, FLOOR), self._limit)

    def measure(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a step that decoded ``rows`` sequences and read ``tokens`` prompt tokens."""
        if not tokens:
            self._since_decode = 0
            self._decode[rows] = _average(self._decode.get(rows), seconds)
        elif rows and self._decode:
            self._since_decode += 1
            cost = max(seconds - self._decode_seconds(rows, self._nearest(rows)), 0.0) / tokens
            self._token = _average(self._token, cost)
        elif not self._token:
            self._token = seconds / tokens

    def _nearest(self, rows: int) -> int:
        """Return the number of sequences nearest to ``rows`` whose duration is known, 0 if none."""
        return min(self._decode, key=lambda known: max(known / rows, rows / known), default=0)

    def _decode_seconds(self, rows: int, nearest: int) -> float:
        """Return a lower bound: a step is not faster with more sequences, and not slower for each of them."""
        return self._decode[nearest] * min(1.0, rows / nearest)


def _average(average: float | None, value: float) -> float:
    return average + _WEIGHT * (min(value, _OUTLIER * average) - average) if average else value
