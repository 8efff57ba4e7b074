"""Selects the differences that a report shows: a sample of their distribution, and the worst texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.contrasts import Contrast, Contrasts

#: The maximum numbers of sampled differences and of texts shown.
MOST_DIFFERENCES: Final = 200
WORST: Final = 10
#: The maximum length of a text shown (characters).
MOST_CHARACTERS: Final = 240


def kept(measure: str, differences: Array, by_text: Sequence[float], describe: Callable[[int], Contrast]) -> Contrasts:
    """Return the contrasts for a report.

    ``differences`` are of texts or of tokens, ``by_text`` of texts.  ``describe`` formats a text by index; texts
    without a difference are omitted.
    """
    order = sorted(range(len(by_text)), key=lambda index: -by_text[index])
    worst = tuple(describe(index) for index in order[:WORST] if by_text[index] > 0)
    return Contrasts(measure, sampled(differences), worst)


def sampled(differences: Array) -> tuple[float, ...]:
    """Return at most ``MOST_DIFFERENCES`` differences at even ranks, including the smallest and the largest."""
    values = np.sort(differences[np.isfinite(differences)].astype(np.float64))
    if len(values) > MOST_DIFFERENCES:
        values = values[np.linspace(0, len(values) - 1, MOST_DIFFERENCES).round().astype(np.int64)]
    return tuple(float(f"{value:.4g}") for value in values)


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Put a text on one line and truncate it, after a word if possible."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    words, _, cut = line[: most - 1].rpartition(" ")
    return f"{words or cut} …"
