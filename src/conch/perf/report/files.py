"""The figures of a measurement in files.  Pure."""

from __future__ import annotations

import csv as csv_module
import io
import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from conch.perf.figures import LatencyFigures
from conch.perf.measured import Measured
from conch.perf.plan import PerfPlan
from conch.perf.report import conditions


def csv(plan: PerfPlan, measured: Sequence[Measured]) -> str:
    """perf_analyzer's columns: microseconds, a row for each level."""
    level = "Request Rate" if plan.rates is not None else "Concurrency"
    headings = [
        level, "Inferences/Second", "Client Send", "Network+Server Send/Recv", "Server Queue", "Server Compute Input",
        "Server Compute Infer", "Server Compute Output", "Client Recv", "p50 latency", "p90 latency", "p95 latency",
        "p99 latency",
    ]  # fmt: skip
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    writer.writerow(headings)
    for one in measured:
        figures = one.figures
        stages = one.server[0].stages if one.server else {}
        server = [_us(stages[name].average) if name in stages else 0 for name in _STAGES]
        latency = figures.latency
        network = max(0, _average(figures.wait) - sum(server))
        writer.writerow([
            f"{one.level:g}", f"{figures.throughput:g}", _average(figures.send), network, *server,
            _average(figures.receive),
            *(_us(latency.percentiles[number]) if latency else 0 for number in (50, 90, 95, 99)),
        ])  # fmt: skip
    return out.getvalue()


def json(plan: PerfPlan, measured: Sequence[Measured]) -> str:
    """Everything that is known, with times in seconds."""
    document = {
        "model": plan.model,
        "protocol": plan.protocol,
        "url": f"{plan.address.host}:{plan.address.port}",
        "batch_size": plan.batch_size,
        "levels": [_level(plan, one) for one in measured],
    }
    return json_module.dumps(document, indent=2) + "\n"


_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


def _level(plan: PerfPlan, measured: Measured) -> dict[str, Any]:
    figures = asdict(measured.figures)
    figures["failures"] = {outcome.name.lower(): count for outcome, count in measured.figures.failures.items()}
    return {
        "request_rate" if plan.rates is not None else "concurrency": measured.level,
        **figures,
        **({"generation": asdict(measured.generation)} if measured.generation is not None else {}),
        "stable": measured.stable,
        "windows": [window.throughput for window in measured.windows],
        "server": [asdict(one) for one in measured.server],
        "errors": measured.errors,
        "sender_busy": round(measured.busy, 3),
        "unfinished": measured.unfinished,
        **conditions.members(measured),
        "warnings": list(measured.warnings),
    }


def _average(latency: LatencyFigures | None) -> int:
    return _us(latency.average) if latency is not None else 0


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
