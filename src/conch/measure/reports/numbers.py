"""Formats numbers for reports: three significant digits, in readable units. Pure."""

from __future__ import annotations

from math import floor, isfinite, log10
from typing import Final

#: Replaces a missing number.
NONE: Final = "–"


def significant(value: float | None, figures: int = 3) -> str:
    """Round to ``figures`` significant digits, but keep all before the point: ``20.1``, ``1,413``, ``0.0123``."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0"
    decimals = figures - 1 - floor(log10(abs(value)))
    rounded = round(value, decimals)
    if rounded:  # 9.996 has become 10.0
        decimals = figures - 1 - floor(log10(abs(rounded)))
    return f"{rounded if decimals > 0 else value:,.{max(0, decimals)}f}"


def milliseconds(seconds: float | None) -> str:
    """Format a time for a column with the unit ms in its heading."""
    return significant(None if seconds is None else seconds * 1e3)


def duration(seconds: float | None) -> str:
    """Format a time for a sentence: ``216 µs``, ``46.8 ms``, ``1.41 s``, ``12 min``."""
    if seconds is None or not isfinite(seconds):
        return NONE
    if abs(seconds) >= 120:
        return f"{seconds / 60:,.0f} min" if abs(seconds) < 7200 else f"{significant(seconds / 3600)} h"
    # 0.9996 ms is written as 1.00 ms, not 1,000 µs.
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 0.9995:
            return f"{significant(seconds * factor)} {unit}"
    return f"{significant(seconds * 1e6)} µs" if seconds else "0 s"


def count(value: float) -> str:
    """Format a whole number: ``12,480``."""
    return f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Format a fraction: ``0.283`` as ``28 %``; below 10 % with another digit."""
    if share is None or not isfinite(share):
        return NONE
    return f"{share:.0%}".replace("%", " %") if abs(share) >= 0.0995 or not share else f"{share:.1%}".replace("%", " %")


def megabytes(size: float | None) -> str:
    """Format a number of bytes for a column with the unit MB (a million bytes) in its heading."""
    return NONE if size is None else significant(size / 1e6)


def bytes_of(size: float | None) -> str:
    """Format a number of bytes for a sentence: ``90.9 MB``, ``46.2 GB``."""
    if size is None:
        return NONE
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * factor:
            return f"{significant(size / factor)} {unit}"
    return f"{size:.0f} bytes"


def times(factor: float) -> str:
    """Format a ratio: ``2.7 times``; near 1 in percent: ``12 % more``, ``8 % less``."""
    if factor >= 2:
        return f"{significant(factor, 2)} times"
    return f"{abs(factor - 1):.0%}".replace("%", " %") + (" more" if factor >= 1 else " less")
