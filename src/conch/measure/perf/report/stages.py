"""Breaks down the average time of a request by stage, from client timestamps and server statistics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from conch.measure.perf.figures import LatencyFigures
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.server.statistics import ServerFigures

#: The stages in the server's statistics, in order.
SERVER_STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")


def server_of(plan: PerfPlan, measured: Measured) -> ServerFigures | None:
    """Return the statistics of the measured model; others may have run as ensemble steps."""
    return next((version for version in measured.server if version.model == plan.model), None)


def stages_of(plan: PerfPlan, measured: Measured) -> Mapping[str, float]:
    """Return the seconds of each stage: ``send``, ``network``, the server's stages, ``receive``.

    ``network`` is the client's wait beyond the server's stages. If parts of a stream arrive while the server computes,
    they are included in the server's stages, and ``receive`` is left out. Without server statistics, ``wait`` replaces
    the stages between ``send`` and ``receive``.
    """
    figures, server = measured.figures, server_of(plan, measured)
    counted = server.stages if server is not None else {}
    send, wait, receive = (_average(stage) for stage in (figures.send, figures.wait, figures.receive))
    if not counted:
        return {"send": send, "wait": wait, "receive": receive}
    stages = {name: counted[name].average if name in counted else 0.0 for name in SERVER_STAGES}
    spent = sum(stages.values())
    if spent > wait:
        return {"send": send, "network": max(0.0, wait + receive - spent), **stages}
    return {"send": send, "network": wait - spent, **stages, "receive": receive}


def _average(latency: LatencyFigures | None) -> float:
    return latency.average if latency is not None else 0.0
