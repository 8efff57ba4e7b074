"""Formats figures for the terminal: numbers of few characters, charts of one line, and the table's columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from conch.measure.top.figures import TopModel

#: Shown for unknown values.
NONE: Final = "·"
_BARS: Final = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """Format a rate or a count: ``0``, ``0.25``, ``3.1``, ``42``, ``1,234``, ``56.7k``."""
    if value is None:
        return NONE
    if value >= 10_000:
        return f"{value / 1000:.1f}k" if value < 1_000_000 else f"{value / 1_000_000:.1f}M"
    if value >= 10 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def milliseconds(value: float | None) -> str:
    """Format a duration (ms): ``0.42 ms``, ``8.1 ms``, ``238 ms``, ``1.5 s``."""
    if value is None:
        return NONE
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    digits = 0 if value >= 100 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} ms"


def size(value: float | None) -> str:
    """Format a size (bytes): ``25 MiB``, ``1.3 GiB``."""
    if value is None:
        return NONE
    mebibytes = value / (1 << 20)
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1000 else f"{mebibytes:.0f} MiB"


def share(value: float | None) -> str:
    """Format a share of 1 in percent."""
    return NONE if value is None else f"{value * 100:.0f} %"


def chart(values: Sequence[float], width: int) -> str:
    """Draw the last values as bars of one line, the highest over the whole height; zeros are the lowest bar."""
    shown = list(values)[-width:]
    highest = max(shown, default=0.0)
    if highest <= 0:
        return _BARS[0] * len(shown)
    return "".join(_BARS[round(value / highest * (len(_BARS) - 1))] for value in shown)


def bar(parts: Sequence[float], width: int) -> list[int]:
    """Divide ``width`` characters among the parts in proportion; a part above zero has at least one."""
    total = sum(parts)
    if total <= 0:
        return [0] * len(parts)
    cells = [max(1, round(part / total * width)) if part > 0 else 0 for part in parts]
    cells[cells.index(max(cells))] += width - sum(cells)
    return cells


class TopColumn(NamedTuple):
    """A column: its title, the key that sorts by it, its text, and the value that it is sorted by."""

    title: str
    key: str
    text: Callable[[TopModel], str]
    value: Callable[[TopModel], float | str]
    #: Columns with a high rank are left out first where the terminal is narrow.
    rank: int = 0


def _number(read: Callable[[TopModel], float | None]) -> Callable[[TopModel], float]:
    def value(model: TopModel) -> float:
        number = read(model)
        return -1.0 if number is None else number

    return value


def _failing(model: TopModel) -> str:
    return number(model.failing) if model.failing else NONE if model.failing is None else "0"


COLUMNS: Final = (
    TopColumn("Model", "n", lambda model: model.name, lambda model: model.name),
    TopColumn("Version", "", lambda model: model.version or NONE, lambda model: model.version, 9),
    TopColumn("State", "t", lambda model: model.state, lambda model: model.state, 1),
    TopColumn("Req/s", "r", lambda model: number(model.rate), _number(lambda model: model.rate)),
    TopColumn("Fail/s", "f", _failing, _number(lambda model: model.failing), 1),
    TopColumn("p50", "", lambda model: milliseconds(model.median), _number(lambda model: model.median), 5),
    TopColumn("p99", "p", lambda model: milliseconds(model.p99), _number(lambda model: model.p99), 1),
    TopColumn("Mean", "l", lambda model: milliseconds(model.mean), _number(lambda model: model.mean), 6),
    TopColumn("Waiting", "w", lambda model: number(model.waiting), _number(lambda model: model.waiting), 2),
    TopColumn("Batch", "b", lambda model: number(model.batch), _number(lambda model: model.batch), 7),
    TopColumn("Inst", "", lambda model: number(model.instances), _number(lambda model: model.instances), 8),
    TopColumn("Memory", "m", lambda model: size(model.memory), _number(lambda model: model.memory), 3),
    TopColumn("Restarts", "a", lambda model: number(model.restarts), _number(lambda model: model.restarts), 4),
)


def arranged(models: Sequence[TopModel], pattern: str, column: TopColumn, reverse: bool) -> list[TopModel]:
    """Return the models whose name or state contains ``pattern``, sorted; equal ones by name."""
    words = pattern.casefold().split()
    kept = [model for model in models if all(word in f"{model.name} {model.state}".casefold() for word in words)]
    kept.sort(key=lambda model: model.key)
    kept.sort(key=column.value, reverse=reverse)
    return kept


def fitting(models: Sequence[TopModel], width: int, padding: int = 1) -> list[TopColumn]:
    """Return the columns whose content fits into ``width`` characters, with ``padding`` on both sides of each."""
    columns = list(COLUMNS)
    widths = {
        column: max([len(column.title) + 1, *(len(column.text(model)) for model in models)]) + 2 * padding
        for column in columns
    }
    while sum(widths[column] for column in columns) > width and any(column.rank for column in columns):
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns
