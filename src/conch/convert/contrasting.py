"""Keeps of all differences what a report shows: a sample of their distribution, and the worst texts.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.contrasts import Contrast, Contrasts

#: Differences that are kept of any number, and the texts that are shown.
MOST_DIFFERENCES: Final = 200
WORST: Final = 10
#: Longer texts are cut.
MOST_CHARACTERS: Final = 240


def kept(measure: str, differences: Array, by_text: Sequence[float], describe: Callable[[int], Contrast]) -> Contrasts:
    """The contrasts of ``differences`` (of texts, or of their tokens) and of texts by their own difference, which
    ``describe`` puts in words by number; those that do not differ are not shown."""
    order = sorted(range(len(by_text)), key=lambda index: -by_text[index])
    worst = tuple(describe(index) for index in order[:WORST] if by_text[index] > 0)
    return Contrasts(measure, sampled(differences), worst)


def sampled(differences: Array) -> tuple[float, ...]:
    """At most ``MOST_DIFFERENCES`` of them, by rank: the smallest, the largest and those evenly between."""
    values = np.sort(differences[np.isfinite(differences)].astype(np.float64))
    if len(values) > MOST_DIFFERENCES:
        values = values[np.linspace(0, len(values) - 1, MOST_DIFFERENCES).round().astype(np.int64)]
    return tuple(float(f"{value:.4g}") for value in values)


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text on one line, cut after a word where it is too long, or within one that is."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    words, _, cut = line[: most - 1].rpartition(" ")
    return f"{words or cut} …"
