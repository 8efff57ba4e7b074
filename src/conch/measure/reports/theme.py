"""The theme of charts, light and dark. Pure.

The colours are those of Okabe and Ito, which are distinguishable with any kind of colour vision; their yellow, which is
hardly visible on white, is replaced by grey.
"""

from __future__ import annotations

from typing import Any, Final

_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7f7f7f", "#8c6d1f")
_ON_DARK: Final = ("#3d95d6", "#f0b429", "#2fbf93", "#dd92bd", "#ee7a33", "#8fd0f5", "#a6a6a6", "#b8963f")
#: Colour of labels, readable on light and on dark backgrounds.
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
