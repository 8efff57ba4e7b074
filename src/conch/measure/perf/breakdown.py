"""Breaks the average latency of a request down into the time of each step between client and engine.

The sources are the client's timestamps, the server's statistics and, within a worker, conch's metrics. All times are
averages, because averages add up. The time of a step that runs once for a whole batch counts in full for each request
of the batch, as each request waits for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from conch.core.errors import ConchError
from conch.measure.metrics_page import labels_of, read_page, samples, with_scheme
from conch.measure.perf.figures import average_of
from conch.measure.perf.measured import Measured
from conch.measure.perf.server.api import ServerApi
from conch.measure.perf.server.statistics import SERVER_STAGES, ServerFigures

# Read before and after a level, never while requests are timed.


#: The port of Triton's metrics.
METRICS_PORT: Final = 8002
#: The stages of a worker's computation: the metric of each (µs), and its description.
WORKER_STAGES: Final[Mapping[str, str]] = {
    "conch_tokenize_wait_duration_us": "decode and tokenise what was not prepared in the queue",
    "conch_arrange_duration_us": "divide, pad and create the arrays",
    "conch_engine_duration_us": "the network",
    "conch_answer_duration_us": "create responses: pooling, scores, labels",
}
_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class StageTotals:
    """The counters of a model's workers: seconds by metric, and seconds of all executions."""

    by_metric: Mapping[str, float]
    infer: float

    def since(self, before: StageTotals) -> StageTotals:
        """Return the increase since ``before``; after a reset of the counters, their current values."""
        if self.infer < before.infer:
            return self
        by_metric = {name: value - before.by_metric.get(name, 0.0) for name, value in self.by_metric.items()}
        return StageTotals(by_metric, self.infer - before.infer)


class StageReader:
    """Reads the counters of one model from the server's metrics and statistics."""

    def __init__(self, metrics_url: str, api: ServerApi, model: str) -> None:
        self._url = with_scheme(metrics_url)
        self._api = api
        self._model = model

    def read(self) -> StageTotals:
        """Return the counters; ``by_metric`` is empty if the server has no metrics of its workers."""
        text = ""
        with suppress(ConchError):
            text = read_page(self._url, _SECONDS)
        statistics: Sequence[Mapping[str, Any]] = ()
        with suppress(ConchError):
            statistics = self._api.statistics()
        return totals_of(text, statistics, self._model)


def totals_of(metrics: str, statistics: Sequence[Mapping[str, Any]], model: str) -> StageTotals:
    """Return the counters of all versions of ``model``, from the text of the metrics and from ``model_stats``."""
    by_metric: dict[str, float] = {}
    for name, labels, value in samples(metrics):
        if name in WORKER_STAGES and labels_of(labels).get("model") == model:
            by_metric[name] = by_metric.get(name, 0.0) + value / 1e6
    batches = [batch for row in statistics if row["name"] == model for batch in row.get("batch_stats", ())]
    infer = sum(int(batch.get("compute_infer", {}).get("ns", 0)) for batch in batches) / 1e9
    return StageTotals(by_metric, infer)


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """One step of a request: the component, its activity, and its average time (s)."""

    where: str
    what: str
    seconds: float


def breakdown(measured: Measured, model: str, protocol: str, stages: StageTotals) -> list[TimeSpent]:
    """Return the steps of a request to ``model``, in order; they add up to its average latency.

    ``stages`` are the differences of the metric counters over the measurement. Returns an empty list if no request was
    completed.
    """
    figures = measured.figures
    if figures.latency is None:
        return []
    server = next((version for version in measured.server if version.model == model), None)
    request = _average(server, "success")
    send, receive, late = (average_of(stage) for stage in (figures.send, figures.receive, figures.late))
    if request > average_of(figures.wait):  # a stream is received while the server computes
        receive = 0.0
    between = figures.latency.average - request - send - receive - late
    late_rows = [TimeSpent("client", "wait for its turn to send", late)] if late > 1e-6 else []
    rows = [*late_rows, TimeSpent("client", "send", send)]
    if server is None or not request:
        rows.append(TimeSpent("server", f"everything: it has no statistics of '{model}'", between))
    else:
        rows.append(TimeSpent("network", f"kernel and network both ways, {protocol} in the server", between))
        rows += _within(server, request, measured.server, stages)
    return [*rows, TimeSpent("client", "receive", receive)] if receive else rows


def _within(
    server: ServerFigures, request: float, models: Sequence[ServerFigures], stages: StageTotals
) -> Iterator[TimeSpent]:
    """Break down the ``request`` seconds that the server's statistics have."""
    parts = {name: _average(server, name) for name in SERVER_STAGES}
    yield TimeSpent("scheduler", "queue", parts["queue"])
    others = [model for model in models if model is not server]
    if others and not server.executions:
        yield from _steps(server, request - parts["queue"], others)
        return
    handed = request - sum(parts.values())
    yield TimeSpent("channel", "to the worker and back: encode, wake up, decode", handed)
    yield TimeSpent("worker", "create the request's tensors", parts["compute_input"])
    infer = parts["compute_infer"]
    shares = {name: min(1.0, value / stages.infer) for name, value in stages.by_metric.items() if stages.infer > 0}
    if any(shares.values()):
        for name, activity in WORKER_STAGES.items():
            yield TimeSpent("engine" if name == "conch_engine_duration_us" else "worker", activity,
                            infer * shares.get(name, 0.0))  # fmt: skip
        yield TimeSpent("worker", "other computation", infer * max(0.0, 1 - sum(shares.values())))
    else:
        yield TimeSpent("worker", "compute: the model's own code", infer)
    yield TimeSpent("worker", "encode the response's tensors", parts["compute_output"])


def _steps(server: ServerFigures, seconds: float, others: Sequence[ServerFigures]) -> Iterator[TimeSpent]:
    """Yield the steps of an ensemble, each as often as it ran for one request of the ensemble."""
    requests = server.stages["success"].count
    spent = 0.0
    for other in others:
        stage = other.stages.get("success")
        if stage is not None:
            mean = stage.average * stage.count / requests
            spent += mean
            yield TimeSpent("step", f"{other.model}: {stage.count / requests:.2g} requests to it", mean)
    yield TimeSpent("ensemble", "between steps (negative: steps ran concurrently)", seconds - spent)


def _average(server: ServerFigures | None, stage: str) -> float:
    figures = server.stages.get(stage) if server is not None else None
    return figures.average if figures is not None else 0.0
