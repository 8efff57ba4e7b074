"""A grouped bar chart as SVG: latency by shape, a bar for each variant, on a logarithmic axis.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import ceil, floor, log10
from typing import Final

COLOURS: Final = ("#8a94a6", "#3b6fb5", "#2e9e6b", "#d98324", "#a14fb0", "#c0392b", "#1f9aa8", "#6b5b3e")
_HEIGHT: Final = 300
_LEFT: Final = 60
_TOP: Final = 30
_BAR: Final = 14
_GAP: Final = 22
_LINE: Final = 20


def plot(series: Mapping[str, Mapping[str, float]], caption: str) -> str:
    """``series`` holds, by name, positive values by group; empty when there are none.

    Groups come in the order of the first series that has them; a value that is missing leaves its place free.
    """
    groups = list(dict.fromkeys(group for values in series.values() for group in values))
    values = [value for by_group in series.values() for value in by_group.values() if value > 0]
    if not values:
        return ""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high = max(high, low + 1)
    span = len(series) * _BAR + _GAP
    width = max(_LEFT + len(groups) * span + 20, 640)
    bottom = _TOP + _HEIGHT

    def y(value: float) -> float:
        return bottom - _HEIGHT * (log10(value) - low) / (high - low)

    marks = [f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(caption)}</text>']
    for power in range(low, high + 1):
        height = y(10.0**power)
        marks.append(f'<line x1="{_LEFT}" x2="{width - 10}" y1="{height:.1f}" y2="{height:.1f}" stroke="#d8dde6"/>')
        marks.append(f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for place, group in enumerate(groups):
        left = _LEFT + place * span + _GAP / 2
        for number, (name, by_group) in enumerate(series.items()):
            value = by_group.get(group, 0.0)
            if value > 0:
                marks.append(_bar(left + number * _BAR, y(value), bottom, number, f"{name}, {group}: {value:.2f}"))
        middle = left + len(series) * _BAR / 2
        marks.append(f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(group)}</text>')
    for number, name in enumerate(series):
        line = bottom + 36 + number * _LINE
        marks.append(f'<rect x="{_LEFT}" y="{line}" width="12" height="12" fill="{_colour(number)}"/>')
        marks.append(f'<text x="{_LEFT + 20}" y="{line + 11}">{escape(name)}</text>')
    tall = bottom + 44 + len(series) * _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" width="{width}" height="{tall}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#1c2330">{"".join(marks)}</svg>'
    )


def _bar(x: float, top: float, bottom: float, number: int, title: str) -> str:
    size = f'x="{x:.1f}" y="{top:.1f}" width="{_BAR - 2}" height="{max(bottom - top, 1):.1f}"'
    return f'<rect {size} fill="{_colour(number)}"><title>{escape(title)}</title></rect>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
