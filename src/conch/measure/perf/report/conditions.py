"""The conditions and the confidence of a measurement: lines for the terminal, members for JSON.

Pure. Lines have times in a fitting unit, JSON in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from conch.measure.perf.figures import Interval
from conch.measure.perf.measured import Measured
from conch.measure.perf.server.resources import ResourceFigures
from conch.measure.reports.numbers import duration, significant


def lines(measured: Measured) -> Iterator[str]:
    """Yield lines with a heading of eleven characters and a sentence each."""
    confidence = measured.confidence
    if confidence is not None:
        sure = confidence.throughput
        parts = [f"{significant(sure.low)} … {significant(sure.high)} infer/s"]
        parts += [f"p{number:g} {_range(confidence.percentiles[number])}"
                  for number in (50, 99) if number in confidence.percentiles]  # fmt: skip
        yield f"95% range  {', '.join(parts)} (over {confidence.count} {confidence.over})"
    if measured.resources is not None:
        yield f"used       {_resources(measured.resources)}"
    for name, metric in measured.metrics.items():
        yield f"metric     {name}: {_number(metric.average)} on average, {_number(metric.largest)} at most"
    if measured.limit:
        yield f"senders    can do {measured.limit:,.0f} requests a second at this level"
    if measured.machine is not None:
        yield f"machine    {measured.machine}"
        if measured.machine.unseen:
            yield f"           {measured.machine.unseen}"


def members(measured: Measured) -> dict[str, Any]:
    """Return the same information as JSON members, with full precision."""
    machine = measured.machine
    return {
        "confidence": asdict(measured.confidence) if measured.confidence is not None else None,
        "runs": [run.throughput for run in measured.runs],
        "resources": asdict(measured.resources) if measured.resources is not None else None,
        "metrics": {name: asdict(metric) for name, metric in measured.metrics.items()},
        "sender_limit": measured.limit,
        "disturbed": measured.disturbed,
        "machine": None if machine is None else asdict(machine),
        "gone": measured.gone,
        "stopped": measured.stopped,
    }


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
