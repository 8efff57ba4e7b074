"""The figures of a measurement as CSV and JSON. Pure."""

from __future__ import annotations

import csv as csv_module
import io
import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from conch import __version__
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.report import conditions
from conch.measure.perf.report.stages import SERVER_STAGES, server_of

#: The version of the JSON format; incremented by changes that break existing readers.
FORMAT: Final = 1


def csv(plan: PerfPlan, measured: Sequence[Measured], *, verbose: bool = False) -> str:
    """Return perf_analyzer's CSV columns: microseconds, a row per level; ``verbose`` adds those of --verbose-csv."""
    headings = [
        "Request Rate" if plan.rates is not None else "Concurrency", "Inferences/Second", "Client Send",
        "Network+Server Send/Recv", "Server Queue", "Server Compute Input", "Server Compute Infer",
        "Server Compute Output", "Client Recv", *(f"p{number:g} latency" for number in plan.percentiles),
    ]  # fmt: skip
    if verbose:
        # Without a percentile, the average is the latency that must be stable, and has its own column.
        headings += [*([] if plan.percentile else ["Avg latency"]), "request/response", "response wait"]
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(_row(plan, measurement, verbose=verbose) for measurement in measured)
    return out.getvalue()


def _row(plan: PerfPlan, measured: Measured, *, verbose: bool) -> list[Any]:
    figures, latency, server = measured.figures, measured.figures.latency, server_of(plan, measured)
    stages = server.stages if server is not None else {}
    counted = [_us(stages[name].average) if name in stages else 0 for name in SERVER_STAGES]
    send, wait, receive = (
        _us(stage.average) if stage else 0 for stage in (figures.send, figures.wait, figures.receive)
    )
    row = [
        f"{measured.level:g}", f"{figures.throughput:g}", send, max(0, wait - sum(counted)), *counted, receive,
        *(_us(latency.percentiles[number]) if latency else 0 for number in plan.percentiles),
    ]  # fmt: skip
    if verbose:
        average = [] if plan.percentile else [_us(latency.average) if latency else 0]
        row += [*average, send + receive, wait]
    return row


def json(plan: PerfPlan, measured: Sequence[Measured]) -> str:
    """Return the whole measurement as JSON, with times in seconds; docs/reports.md describes the members."""
    document = {
        "format": FORMAT,
        "conch": __version__,
        "model": plan.model,
        "protocol": plan.protocol,
        "url": plan.address.shown,
        "batch_size": plan.batch_size,
        "sent": measured[0].sent if measured else "",
        "levels": [_level(plan, measurement) for measurement in measured],
    }
    return json_module.dumps(document, indent=2) + "\n"


def _level(plan: PerfPlan, measured: Measured) -> dict[str, Any]:
    figures = asdict(measured.figures)
    figures["failures"] = {outcome.name.lower(): count for outcome, count in measured.figures.failures.items()}
    return {
        "request_rate" if plan.rates is not None else "concurrency": measured.level,
        **figures,
        **({"generation": asdict(measured.generation)} if measured.generation is not None else {}),
        "stable": measured.stable,
        "windows": [window.throughput for window in measured.windows],
        "server": [asdict(version) for version in measured.server],
        "errors": measured.errors,
        "sender_busy": round(measured.busy, 3),
        "unfinished": measured.unfinished,
        **conditions.members(measured),
        "warnings": list(measured.warnings),
    }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
