"""The charts of reports, made with Altair: lines, bars and distributions by percentile.

Each function returns a :class:`~conch.measure.reports.report.Chart`. Figures that cannot be shown are omitted: infinite
ones, and those that are not above 0 on logarithmic axes.

The colours are those of Okabe and Ito, which are distinguishable with any kind of colour vision; their yellow, which is
hardly visible on white, is replaced by grey.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import Any, Final, Literal

from conch.measure.reports.report import Chart

_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7f7f7f", "#8c6d1f")
_ON_DARK: Final = ("#3d95d6", "#f0b429", "#2fbf93", "#dd92bd", "#ee7a33", "#8fd0f5", "#a6a6a6", "#b8963f")
#: Colour of labels and of muted dots, readable on light and on dark backgrounds.
FAINT: Final = "#7f8896"
#: Shapes that distinguish series without colours, as on paper.
SHAPES: Final = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "stroke")
FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Helvetica, Arial, sans-serif"


def chart_config(*, dark: bool, wide: bool = True) -> dict[str, Any]:
    """Return the Vega-Lite configuration of all charts; charts that are not ``wide`` have fewer legend columns."""
    ink, faint, line = ("#d9dee7", "#a3adbd", "#39424f") if dark else ("#1c2330", "#5b6575", "#e3e7ee")
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": faint, "titleColor": ink, "gridColor": line, "domainColor": faint, "tickColor": faint,
            "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 8,
            "domain": False, "ticks": False, "labelPadding": 6, "labelLimit": 220,
        },
        "axisX": {"grid": False, "domain": True},
        "legend": {
            "labelColor": ink, "titleColor": ink, "labelFontSize": 12, "orient": "top", "title": None,
            "labelLimit": 240 if wide else 150, "symbolStrokeWidth": 2, "columnPadding": 18, "offset": 12,
            "columns": 5 if wide else 2,
        },
        "range": {"category": list(_ON_DARK if dark else _COLOURS)},
        "text": {"color": faint, "font": FONT, "fontSize": 11},
        "rule": {"color": faint},
        "line": {"strokeWidth": 2},
        "bar": {"discreteBandSize": {"band": 0.72}},
    }  # fmt: skip


#: The percentiles labelled on the axis of a distribution, as positions: 1 / (1 - fraction).
_PERCENTILES: Final = (1, 2, 10, 100, 1_000, 10_000, 100_000)
_PERCENTILE_LABEL: Final = "datum.value < 1.01 ? 'p0' : 'p' + format(100 - 100 / datum.value, '.5~r')"
_MOST_LABELS: Final = 14


@dataclass(frozen=True, slots=True)
class Axis:
    """A title with its unit; a linear axis begins at 0 if ``zero``."""

    title: str
    logarithmic: bool = False
    zero: bool = True


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a chart with a tooltip ``label``, and its interval from ``low`` to ``high``; grey if ``muted``."""

    x: float
    y: float
    label: str = ""
    low: float | None = None
    high: float | None = None
    muted: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """Named dots, in the order in which a line joins them."""

    name: str
    dots: Sequence[Dot]


@dataclass(frozen=True, slots=True)
class Limit:
    """A line across the chart at a value of one axis, such as the maximum latency."""

    axis: Literal["x", "y"]
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """The value of a ``part`` (colour) of a ``group`` (position)."""

    group: str
    part: str
    value: float


def line_chart(
    title: str, series: Sequence[Series], x: Axis, y: Axis, *, alt: str, caption: str = "", joined: bool = True,
    labels: bool = False, limits: Sequence[Limit] = (), wide: bool = True,
) -> Chart:  # fmt: skip
    """Return a chart of dots with a colour and a shape per series, ``joined`` by lines, with ``labels`` beside them."""
    altair = _altair()
    rows: list[dict[str, Any]] = [
        {"series": line.name, "x": _short(dot.x), "y": _short(dot.y), "label": dot.label, "order": number}
        | _interval(y, dot)
        | ({"muted": True} if dot.muted else {})
        for line in series
        for number, dot in enumerate(line.dots)
        if _fits(x, dot.x) and _fits(y, dot.y)
    ]
    names = [line.name for line in series]
    across = [*(row["x"] for row in rows), *(limit.value for limit in limits if limit.axis == "x")]
    up = [row[name] for row in rows for name in ("y", "low", "high") if name in row]
    up += [limit.value for limit in limits if limit.axis == "y"]
    base = altair.Chart(altair.Data(values=rows)).encode(
        x=altair.X("x:Q", title=x.title, scale=_scale(x, across), axis=_axis(x, across)),
        y=altair.Y("y:Q", title=y.title, scale=_scale(y, up), axis=_axis(y, up)),
        color=_colour("series", names),
    )
    faded, pick = _picked("series")
    shown = [altair.Tooltip("series:N", title="series")] if len(names) > 1 else []
    named = [altair.Tooltip("label:N", title=" ")] if any(row["label"] for row in rows) else []
    dots = base.mark_point(filled=True, size=55).encode(
        opacity=faded,
        shape=altair.Shape("series:N", scale=altair.Scale(domain=names, range=_shapes(len(names))),
                           legend=_legend(names)),
        tooltip=[
            *shown, *named,
            altair.Tooltip("x:Q", title=x.title, format=",.4~r"), altair.Tooltip("y:Q", title=y.title, format=",.4~r"),
        ],
    ).add_params(pick)  # fmt: skip
    if any("muted" in row for row in rows):
        dots = dots.encode(color=altair.condition("datum.muted", altair.value(FAINT), _colour("series", names)))
    layers = [dots]
    if joined:
        layers.insert(0, base.mark_line().encode(opacity=faded, order=altair.Order("order:Q")))
    if any("low" in row for row in rows):
        layers.append(base.mark_rule().encode(y=altair.Y("low:Q", title=y.title), y2="high:Q", opacity=faded))
    if labels:
        layers.append(
            base.mark_text(align="left", dx=7, dy=-7).encode(text="label:N", opacity=faded, color=altair.value(FAINT))
        )
    layers += _limits(limits)
    return Chart(title, _spec(altair.layer(*layers), wide), alt, caption, wide)


def bar_chart(
    title: str, bars: Sequence[Bar], value: Axis, *, alt: str, caption: str = "", stacked: bool = False,
    group_title: str = "", wide: bool = True,
) -> Chart:  # fmt: skip
    """Return horizontal bars by group, in the order given; the parts are side by side, or ``stacked``."""
    altair = _altair()
    groups = list(dict.fromkeys(bar.group for bar in bars))
    parts = list(dict.fromkeys(bar.part for bar in bars))
    rows: list[dict[str, Any]] = [
        {"group": bar.group, "part": bar.part, "value": _short(bar.value), "order": parts.index(bar.part)}
        for bar in bars
        if _fits(value, bar.value)
    ]
    faded, pick = _picked("part")
    chart = altair.Chart(altair.Data(values=rows)).mark_bar().encode(
        x=altair.X("value:Q", title=value.title, stack="zero" if stacked else None, scale=_scale(value),
                   axis=_axis(value, (row["value"] for row in rows))),
        y=altair.Y("group:N", title=group_title or None, sort=groups),
        color=_colour("part", parts),
        opacity=faded,
        tooltip=[
            altair.Tooltip("group:N", title=group_title or "of"), altair.Tooltip("part:N", title="part"),
            altair.Tooltip("value:Q", title=value.title, format=",.4~r"),
        ],
    ).add_params(pick)  # fmt: skip
    if stacked:
        chart = chart.encode(order=altair.Order("order:Q"))
    elif len(parts) > 1:
        chart = chart.encode(yOffset=altair.YOffset("part:N", sort=parts))
    spec = _spec(chart, wide)
    lines = len(groups) * (1 if stacked else max(1, 0.6 * len(parts)))
    spec["height"] = round(max(60, 30 * lines))
    spec["encoding"]["x"]["axis"] |= {"grid": True, "domain": False}
    return Chart(title, spec, alt, caption, wide)


def percentile_chart(
    title: str, series: Sequence[Series], y: Axis, *, alt: str, caption: str = "", limits: Sequence[Limit] = (),
    wide: bool = True,
) -> Chart:  # fmt: skip
    """Return a distribution by percentile.

    ``x`` of each dot is a fraction from 0 to below 1. The scale is logarithmic towards the tail: p99 to p99.9 is as
    wide as p90 to p99.
    """
    altair = _altair()
    rows: list[dict[str, Any]] = [
        {
            "series": line.name, "x": _short(1 / (1 - dot.x)), "y": _short(dot.y),
            "label": f"p{_short(100 * dot.x):g}", "order": number,
        }
        for line in series
        for number, dot in enumerate(line.dots)
        if 0 <= dot.x < 1 and _fits(y, dot.y)
    ]  # fmt: skip
    names = [line.name for line in series]
    up = [*(row["y"] for row in rows), *(limit.value for limit in limits if limit.axis == "y")]
    furthest = max((row["x"] for row in rows), default=100)
    ticks = [percentile for percentile in _PERCENTILES if percentile <= furthest * 1.01]
    faded, pick = _picked("series")
    base = altair.Chart(altair.Data(values=rows)).encode(
        x=altair.X("x:Q", title="percentile", scale=altair.Scale(type="log", domain=[1, furthest], nice=False),
                   axis=altair.Axis(values=ticks, labelExpr=_PERCENTILE_LABEL)),
        y=altair.Y("y:Q", title=y.title, scale=_scale(y, up), axis=_axis(y, up)),
        color=_colour("series", names),
    )  # fmt: skip
    lines = base.mark_line().encode(opacity=faded, order=altair.Order("order:Q")).add_params(pick)
    tips = [altair.Tooltip("series:N", title="series")] if len(names) > 1 else []
    # Lines alone are hard to point at.
    points = base.mark_point(size=60, filled=True, opacity=0).encode(
        tooltip=[*tips, altair.Tooltip("label:N", title="percentile"),
                 altair.Tooltip("y:Q", title=y.title, format=",.4~r")],
    )  # fmt: skip
    return Chart(title, _spec(altair.layer(lines, points, *_limits(limits)), wide), alt, caption, wide)


def _altair() -> Any:
    from conch.machine.extras import load

    return load("A chart", "altair")


def _spec(chart: Any, wide: bool) -> dict[str, Any]:
    """Return the specification in a size that the writer may change; the writer also sets the theme."""
    spec: dict[str, Any] = chart.properties(width=820 if wide else 390, height=300 if wide else 250).to_dict()
    del spec["config"]
    return spec


def _limits(limits: Sequence[Limit]) -> list[Any]:
    altair = _altair()
    layers = []
    for limit in limits:
        base = altair.Chart(altair.Data(values=[{"at": limit.value, "label": limit.label}]))
        if limit.axis == "y":
            layers.append(base.mark_rule(strokeDash=[5, 4]).encode(y="at:Q"))
            text = base.mark_text(align="left", baseline="bottom", dx=4, dy=-3)
            layers.append(text.encode(y="at:Q", x=altair.value(0), text="label:N"))
        else:
            layers.append(base.mark_rule(strokeDash=[5, 4]).encode(x="at:Q"))
            text = base.mark_text(align="left", baseline="top", dx=4, dy=4)
            layers.append(text.encode(x="at:Q", y=altair.value(0), text="label:N"))
    return layers


def _scale(axis: Axis, values: Iterable[float] = ()) -> Any:
    """Return a scale; a logarithmic scale ends at the axis marks around ``values``, or else at powers of ten."""
    altair = _altair()
    if not axis.logarithmic:
        return altair.Scale(zero=axis.zero, nice=True)
    positive = [value for value in values if value > 0]
    if not positive:
        return altair.Scale(type="log", nice=True)
    marks = [step * 10.0**power for power in range(floor(log10(min(positive))), ceil(log10(max(positive))) + 1)
             for step in (1, 2, 5)]  # fmt: skip
    low = max((mark for mark in marks if mark <= min(positive) * 1.0001), default=min(positive))
    high = min((mark for mark in marks if mark >= max(positive) * 0.9999), default=max(positive))
    return altair.Scale(type="log", domain=[low, high if high > low else 10 * low], nice=False)


def _axis(axis: Axis, values: Iterable[float]) -> Any:
    """Return an axis with a few round numbers; if logarithmic, 1, 2 and 5 times powers of ten, or fewer."""
    altair = _altair()
    if not axis.logarithmic:
        return altair.Axis(format=",~r", tickCount=6, labelOverlap="parity")
    exponents = [log10(value) for value in values if value > 0]
    low, high = (floor(min(exponents)), ceil(max(exponents))) if exponents else (0, 1)
    steps = (1, 2, 5) if high - low <= 2 else (1, 3) if high - low <= 4 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    return altair.Axis(format=",~r", values=ticks, labelOverlap="greedy")


def _colour(field: str, names: Sequence[str]) -> Any:
    altair = _altair()
    return altair.Color(f"{field}:N", scale=altair.Scale(domain=list(names)), legend=_legend(names))


def _legend(names: Sequence[str]) -> Any:
    """Return a legend; none for a single series, which the title names."""
    altair = _altair()
    return altair.Legend(title=None, symbolLimit=_MOST_LABELS) if len(names) > 1 else None


def _picked(field: str) -> tuple[Any, Any]:
    """Return the opacity of marks, and the selection (a click on the legend) that fades other series."""
    altair = _altair()
    pick = altair.selection_point(fields=[field], bind="legend", name="picked")
    return altair.condition(pick, altair.value(1.0), altair.value(0.12)), pick


def _shapes(count: int) -> list[str]:
    return [SHAPES[number % len(SHAPES)] for number in range(count)]


def _interval(axis: Axis, dot: Dot) -> dict[str, float]:
    """Return the interval of a dot; on a logarithmic axis, its lower end is at least a tenth of the dot."""
    if dot.low is None or dot.high is None:
        return {}
    low = max(dot.low, dot.y / 10) if axis.logarithmic else dot.low
    return {"low": _short(low), "high": _short(dot.high)}


def _fits(axis: Axis, value: float) -> bool:
    return isfinite(value) and (value > 0 or not axis.logarithmic)


def _short(value: float) -> float:
    """Round to six significant digits, to keep the file small."""
    return float(f"{value:.6g}")
