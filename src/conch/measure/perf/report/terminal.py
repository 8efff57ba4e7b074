"""The terminal output of ``conch perf``: a live line, and a section with the figures of each level.

Times in sentences have a fitting unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from conch.machine.facts import MachineFacts
from conch.measure.perf.breakdown import TimeSpent
from conch.measure.perf.figures import GenerationFigures, Interval, LatencyFigures, WindowFigures
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.run import Measurement
from conch.measure.perf.server.resources import ResourceFigures
from conch.measure.perf.server.statistics import ServerFigures
from conch.measure.reports.numbers import duration, significant
from conch.measure.reports.report import Block, Bullets, Column, Note, Properties, Row, Section, Table

if TYPE_CHECKING:
    from rich.console import Console

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
        return f"{level:g} requests per second ({plan.distribution})"
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
        self._status.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._status.stop()

    def on_window(self, window: WindowFigures) -> None:
        """Show the figures of a completed window."""
        self._windows += 1
        latency = f", {duration(window.latency.average)} on average" if window.latency else ", no responses"
        text = (
            f"{self._level}: window {self._windows} of at most {self._trials}: {window.throughput:.0f} infer/s{latency}"
        )
        self._status.update(text)
        if self._print_windows:
            self._console.print(f"{text}, {window.seconds:.1f} s", highlight=False)


def level_section(plan: PerfPlan, measured: Measured) -> Section:
    """Return the figures of a level, its warnings, and its most frequent errors."""
    figures = measured.figures
    disturbed = ", disturbed" if measured.disturbed else ""
    blocks: list[Block] = [Properties(list(_figures(plan, measured)))]
    blocks += [Note("warning", warning) for warning in measured.warnings]
    if measured.errors:
        blocks.append(Bullets([f"{count} x {text}" for text, count in Counter(measured.errors).most_common(5)]))
    return Section(
        f"{level_of(plan, measured.level)}: {figures.throughput:.1f} infer/s, {figures.requests} requests{disturbed}",
        blocks,
    )


def breakdown_table(spent: Sequence[TimeSpent], level: str) -> Table:
    """Return a table of the time of a request by step, with the share of each."""
    total = sum(step.seconds for step in spent)
    caption = f"Average request at {level}" if spent else f"No request succeeded at {level}"
    rows = [Row([step.where, step.what, 1e6 * step.seconds, step.seconds / total]) for step in spent]
    rows.append(Row(["all", "the client's average latency", 1e6 * total, ""]))
    columns = [
        Column("where"),
        Column("what"),
        Column("µs", True, "{:.0f}".format),
        Column("share", True, "{:.1%}".format),
    ]
    return Table(caption, columns, rows)


def _figures(plan: PerfPlan, measured: Measured) -> Iterator[tuple[str, str]]:
    figures = measured.figures
    if figures.latency is not None:
        yield "latency", _spread(figures.latency)
    parts = (("send", figures.send), ("wait", figures.wait), ("receive", figures.receive))
    client = ", ".join(f"{name} {duration(latency.average)}" for name, latency in parts if latency is not None)
    if client:
        yield "client", client
    if measured.generation is not None:
        yield from _generation(measured.generation)
    if plan.rates is not None and figures.late is not None:
        yield "sent late", _spread(figures.late)
    for version in measured.server:
        yield "server", _server(version)
    yield from _conditions(measured)


def _conditions(measured: Measured) -> Iterator[tuple[str, str]]:
    confidence = measured.confidence
    if confidence is not None:
        interval = confidence.throughput
        parts = [f"{significant(interval.low)} … {significant(interval.high)} infer/s"]
        parts += [f"p{number:g} {_range(confidence.percentiles[number])}"
                  for number in (50, 99) if number in confidence.percentiles]  # fmt: skip
        yield "95% range", f"{', '.join(parts)} (over {confidence.count} {confidence.over})"
    if measured.resources is not None:
        yield "used", _resources(measured.resources)
    for name, metric in measured.metrics.items():
        yield "metric", f"{name}: {_number(metric.average)} on average, {_number(metric.largest)} at most"
    if measured.limit:
        yield "senders", f"can reach {measured.limit:,.0f} requests per second at this level"
    if measured.machine is not None:
        yield "machine", str(measured.machine)
        if measured.machine.unseen:
            yield "", measured.machine.unseen


def _spread(latency: LatencyFigures) -> str:
    percentiles = ", ".join(f"p{number:g} {duration(value)}" for number, value in latency.percentiles.items())
    average = f"{duration(latency.average)} on average (sd {duration(latency.deviation)})"
    return f"{average}, {percentiles}, longest {duration(latency.longest)}"


def _generation(figures: GenerationFigures) -> Iterator[tuple[str, str]]:
    goodput = "" if figures.goodput is None else f", {figures.goodput:.2f} requests per second meet the objective"
    yield "tokens", f"{figures.tokens:.1f} a second, {figures.tokens_per_user:.1f} for each request{goodput}"
    if figures.ttft is not None:
        yield "first", _spread(figures.ttft)
    if figures.itl is not None:
        yield "between", _spread(figures.itl)


def _server(figures: ServerFigures) -> str:
    stages = ", ".join(
        f"{name.replace('_', ' ')} {duration(stage.average)}"
        for name, stage in figures.stages.items()
        if name != "success"
    )
    batch = f", batch size {figures.batch_size:.1f}" if figures.executions else ""
    return f"{figures.model} {figures.version}: {figures.inferences} inferences{batch}; {stages}"


def _resources(used: ResourceFigures) -> str:
    gpus = (
        f"; {uuid}: {gpu.utilisation:.0%} busy, {gpu.memory / 2**20:,.0f} MiB"
        + (f", {gpu.power:.0f} W" if gpu.power else "")
        for uuid, gpu in used.gpus.items()
    )
    return f"by the server: {used.cores:.2f} cores, {used.memory / 2**20:,.0f} MiB{''.join(gpus)}"


def _range(interval: Interval) -> str:
    return f"{duration(interval.low)} … {duration(interval.high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
