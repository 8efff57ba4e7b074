"""The terminal output of ``conch perf``: a live line, the figures of each level, and a summary table.

Times in sentences have a fitting unit; those in the table are in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import fill
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from conch.machine.facts import MachineFacts
from conch.measure.perf.breakdown import TimeSpent
from conch.measure.perf.figures import GenerationFigures, LatencyFigures, WindowFigures
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.report import conditions
from conch.measure.perf.report.stages import server_of
from conch.measure.perf.run import Measurement
from conch.measure.perf.server.statistics import ServerFigures
from conch.measure.reports.numbers import duration, milliseconds, significant

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

#: Narrower terminals get fewer columns.
_WIDE: Final = 90
#: Indentation of wrapped lines, below the text after the heading.
_INDENT: Final = " " * 13
_WARNING: Final = "warning"
#: The extension that contains conch's version.
_CONCH: Final = re.compile(r"conch\((.+)\)")


def opening(measurement: Measurement) -> str:
    """Describe the server, the model, and the requests."""
    plan = measurement.plan
    batch = f", {plan.batch_size} inferences in a request" if plan.batch_size > 1 else ""
    sent = f", {measurement.sent}" if measurement.sent else ""
    return (
        f"{product_of(measurement.server)} at {plan.address.shown} over {plan.protocol.upper()}: model '{plan.model}'"
        f"{sent}{batch}\nmeasured on {MachineFacts.read()}"
    )


def product_of(server: Mapping[str, Any]) -> str:
    """The server's software and version, from its metadata.

    conch lists its own among the extensions, because the protocol's name and version fields identify it as Triton.
    """
    for extension in server.get("extensions", ()):
        if known := _CONCH.fullmatch(extension):
            return f"conch {known[1]}"
    return f"{server.get('name', 'server')} {server.get('version', '')}".strip()


def level_of(plan: PerfPlan, level: float) -> str:
    """Describe the level."""
    if plan.rates is not None:
        return f"{level:g} requests a second ({plan.distribution})"
    return f"concurrency {level:g}"


class LiveLine:
    """A live terminal line with the progress of a level; ``print_windows`` also prints a permanent line per window."""

    def __init__(self, console: Console, plan: PerfPlan, level: float, *, print_windows: bool = False) -> None:
        self._console, self._print_windows = console, print_windows
        self._level = level_of(plan, level)
        self._trials = plan.trials
        self._windows = 0
        self._status = console.status(f"{self._level}: warming up")

    def __enter__(self) -> LiveLine:
        self._status.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.__exit__(kind, error, trace)

    def on_window(self, window: WindowFigures) -> None:
        """Show the figures of a completed window."""
        self._windows += 1
        latency = f", {duration(window.latency.average)} on average" if window.latency else ", no answers"
        text = (
            f"{self._level}: window {self._windows} of {self._trials} at most: {window.throughput:.0f} infer/s{latency}"
        )
        self._status.update(text)
        if self._print_windows:
            self._console.print(f"{text}, {window.seconds:.1f} s", highlight=False)


def details(plan: PerfPlan, measured: Measured, width: int) -> Text:
    """Return the figures of one level, in lines of at most ``width`` columns."""
    from rich.text import Text

    figures = measured.figures
    disturbed = ", disturbed" if measured.disturbed else ""
    headline = (
        f"{level_of(plan, measured.level)}: {figures.throughput:.1f} infer/s, {figures.requests} requests{disturbed}"
    )
    lines = [headline]
    if figures.latency is not None:
        lines.append(f"  latency    {_spread(figures.latency)}")
    parts = (("send", figures.send), ("wait", figures.wait), ("receive", figures.receive))
    client = ", ".join(f"{name} {duration(latency.average)}" for name, latency in parts if latency is not None)
    if client:
        lines.append(f"  client     {client}")
    if measured.generation is not None:
        lines += _generation(measured.generation)
    if plan.rates is not None and figures.late is not None:
        lines.append(f"  sent late  {_spread(figures.late)}")
    lines += [f"  server     {_server(version)}" for version in measured.server]
    lines += [f"  {line}" for line in conditions.lines(measured)]
    lines += [f"  {_WARNING}    {warning}" for warning in measured.warnings]
    lines += [f"{_INDENT}{count} x {message}" for message, count in _most(measured.errors)]
    shown = Text("\n")
    for line in lines:
        # Texts from servers are not markup, and may have any length.
        wrapped = fill(line, width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
        grey = "dim" if measured.disturbed and line is headline else ""
        shown.append(wrapped + "\n", "yellow" if line.startswith(f"  {_WARNING}") else grey)
    shown.rstrip()
    return shown


def summary(plan: PerfPlan, measured: Sequence[Measured], width: int) -> Table:
    """Return a table of all levels; narrow terminals get fewer columns."""
    from rich.table import Table

    narrow = width < _WIDE
    numbers = [number for number in plan.percentiles if not narrow or number in (50, 99, plan.percentile)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("requests/s" if plan.rates is not None else "concurrency", justify="right")
    table.add_column("infer/s", justify="right")
    for heading in ("average", *(f"p{number:g}" for number in numbers), "queue", "compute"):
        table.add_column(f"{heading}\nms", justify="right", no_wrap=True)
    table.add_column("failed", justify="right")
    for measurement in measured:
        figures, server, latency = measurement.figures, server_of(plan, measurement), measurement.figures.latency
        stages = server.stages if server is not None else {}
        table.add_row(
            f"{measurement.level:g}",
            significant(figures.throughput),
            milliseconds(latency.average if latency else None),
            *(milliseconds(latency.percentiles[number] if latency else None) for number in numbers),
            *(milliseconds(stages[name].average if name in stages else None) for name in ("queue", "compute_infer")),
            str(measurement.failed),
            style="red" if measurement.gone or not figures.requests else "dim" if measurement.disturbed else "",
        )
    return table


def stretches(spent: Sequence[TimeSpent], level: str) -> Table:
    """Return a table of the time of a request by step, with the share of each."""
    from rich.table import Table
    from rich.text import Text

    total = sum(stretch.seconds for stretch in spent)
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left", title_style="bold")
    table.title = f"One request on average at {level}" if spent else f"No request was answered at {level}"
    for heading, justify in (("where", "left"), ("what", "left"), ("µs", "right"), ("share", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for stretch in spent:
        share = f"{stretch.seconds / total:.1%}"
        table.add_row(stretch.where, Text(stretch.what), f"{stretch.seconds * 1e6:.0f}", share)
    table.add_row("all", "the client's average latency", f"{total * 1e6:.0f}", "", style="bold")
    return table


def _spread(latency: LatencyFigures) -> str:
    percentiles = ", ".join(f"p{number:g} {duration(value)}" for number, value in latency.percentiles.items())
    average = f"{duration(latency.average)} on average (sd {duration(latency.deviation)})"
    return f"{average}, {percentiles}, longest {duration(latency.longest)}"


def _generation(figures: GenerationFigures) -> list[str]:
    """Return lines with token rates and times."""
    goodput = "" if figures.goodput is None else f", {figures.goodput:.2f} requests a second keep the objective"
    lines = [f"  tokens     {figures.tokens:.1f} a second, {figures.tokens_per_user:.1f} for each request{goodput}"]
    if figures.ttft is not None:
        lines.append(f"  first      {_spread(figures.ttft)}")
    if figures.itl is not None:
        lines.append(f"  between    {_spread(figures.itl)}")
    return lines


def _server(figures: ServerFigures) -> str:
    stages = ", ".join(
        f"{name.replace('_', ' ')} {duration(stage.average)}"
        for name, stage in figures.stages.items()
        if name != "success"
    )
    batch = f", batch size {figures.batch_size:.1f}" if figures.executions else ""
    return f"{figures.model} {figures.version}: {figures.inferences} inferences{batch}; {stages}"


def _most(errors: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(errors.items(), key=lambda entry: -entry[1])[:5]
