"""The terminal output of an analysis: the result in sentences, and the ranking as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from conch.measure.analyze.report.analysis import Analysis
from conch.measure.analyze.report.columns import ranking_table
from conch.measure.analyze.report.words import doubts, headline, missing, reasons

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: Maximum number of configurations in the table; files have all of them.
_SHOWN: Final = 10
#: Narrower terminals get short headings.
_WIDE: Final = 130
_SHORT: Final = {
    "Model Config Name": "config", "Max Batch Size": "max batch", "Dynamic Batching": "dyn. batch",
    "Preferred Sizes": "preferred", "Queue Delay (µs)": "delay µs", "Also Changed": "also",
    "Total Instance Count": "inst.", "Concurrency": "conc.", "Request Rate": "rate", "p99 Latency (ms)": "p99 ms",
    "Throughput (infer/sec)": "infer/s", "Max GPU Memory Usage (MB)": "GPU MB", "Average GPU Utilization (%)": "GPU %",
    "Max CPU Memory Usage (MB)": "CPU MB", "Average CPU Usage (cores)": "cores",
}  # fmt: skip
_CELLS: Final = {"Enabled": "on", "Disabled": "off"}


def shown(analysis: Analysis, width: int) -> Iterator[RenderableType]:
    """Yield the output from top to bottom, for a terminal of ``width`` columns."""
    from rich.text import Text

    if analysis.measured:
        yield ranking(analysis, width)
        rest = len(analysis.measured) - _SHOWN
        if rest > 0:
            yield Text(f"and {rest} more", style="dim")
        yield Text()
    yield Text(headline(analysis), style="bold" if analysis.recommended else "bold yellow")
    for reason in reasons(analysis):
        yield Text(f"  {reason}")
    for doubt in doubts(analysis):
        yield Text(f"warning: {doubt}", style="yellow")
    lines = list(missing(analysis))
    if lines:
        yield Text("Not measured, or failed:")
    for line in lines:
        yield Text(f"  {line}", style="dim")
    if analysis.apply and analysis.advice == "use":
        yield Text(f"To use it: {analysis.apply}")


def ranking(analysis: Analysis, width: int) -> Table:
    """Return a table of the best configurations; narrow terminals get short headings, and names without the model's."""
    from rich.table import Table
    from rich.text import Text

    content = ranking_table(analysis, analysis.measured[:_SHOWN])
    narrow = width < _WIDE
    table = Table(
        title=Text(f"{', '.join(analysis.models)}: {analysis.wanted}"), title_justify="left", title_style="bold",
        box=None, pad_edge=False, header_style="bold", collapse_padding=narrow,
    )  # fmt: skip
    for column in content.columns:
        heading = _SHORT.get(column.heading, column.heading) if narrow else column.heading
        # Headings take several lines, so that cells fit on one.
        text = Text(heading.replace(" ", "\n"))
        table.add_column(text, justify="right" if column.number else "left", no_wrap=column.number, overflow="fold")
    prefix = f"{analysis.models[0]}_" if narrow and len(analysis.models) == 1 else ""
    for row in content.rows:
        style = {"good": "green", "muted": "dim"}.get(row.tone, "")
        cells = [row.cells[0].removeprefix(prefix), *row.cells[1:]]
        table.add_row(*(Text(_CELLS.get(cell, cell) if narrow else cell) for cell in cells), style=style)
    return table
