"""Where the time of a request goes, on average: what clients see and what the server counted.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from conch.perf.figures.latency import LatencyFigures
from conch.perf.measured import Measured
from conch.perf.plan import PerfPlan
from conch.perf.server.statistics import ServerFigures

#: The stages that the server counts, in their order.
SERVER_STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")


def server_of(plan: PerfPlan, measured: Measured) -> ServerFigures | None:
    """What the server counted for the model that was asked; others may have run as steps of an ensemble."""
    return next((one for one in measured.server if one.model == plan.model), None)


def stages_of(plan: PerfPlan, measured: Measured) -> Mapping[str, float]:
    """Seconds by stage: ``send``, ``network``, the server's, ``receive``.

    ``network`` is what clients wait for beyond what the server counts.  What a stream brings while the server computes
    is among the server's stages, and then there is no ``receive``.  Where the server counts nothing, ``wait`` is all
    that is known.
    """
    figures, server = measured.figures, server_of(plan, measured)
    counted = server.stages if server is not None else {}
    send, wait, receive = (_average(one) for one in (figures.send, figures.wait, figures.receive))
    if not counted:
        return {"send": send, "wait": wait, "receive": receive}
    stages = {name: counted[name].average if name in counted else 0.0 for name in SERVER_STAGES}
    spent = sum(stages.values())
    if spent > wait:
        return {"send": send, "network": max(0.0, wait + receive - spent), **stages}
    return {"send": send, "network": wait - spent, **stages, "receive": receive}


def _average(latency: LatencyFigures | None) -> float:
    return latency.average if latency is not None else 0.0
