"""Reads the time of each stage within the server's workers from conch's metrics.

Read before and after a level, never while requests are timed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from conch.core.errors import ConchError
from conch.measure.perf.server.api import ServerApi
from conch.measure.perf.server.metrics import read_page, with_scheme

#: The port of Triton's metrics.
METRICS_PORT: Final = 8002
#: The stages of a worker's computation: the metric of each (µs), and its description.
WORKER_STAGES: Final[Mapping[str, str]] = {
    "conch_tokenize_wait_duration_us": "decode and tokenise what was not prepared in the queue",
    "conch_arrange_duration_us": "divide, pad and make the arrays",
    "conch_engine_duration_us": "the network",
    "conch_answer_duration_us": "make answers: pooling, scores, labels",
}
_LINE: Final = re.compile(r"(\w+)\{([^}]*)\} ([0-9.eE+-]+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
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
            statistics = self._api.statistics("", "")
        return totals_of(text, statistics, self._model)


def totals_of(metrics: str, statistics: Sequence[Mapping[str, Any]], model: str) -> StageTotals:
    """Return the counters of all versions of ``model``, from the text of the metrics and from ``model_stats``."""
    by_metric: dict[str, float] = {}
    for name, labels, value in _LINE.findall(metrics):
        if name in WORKER_STAGES and dict(_LABEL.findall(labels)).get("model") == model:
            by_metric[name] = by_metric.get(name, 0.0) + float(value) / 1e6
    batches = [batch for row in statistics if row["name"] == model for batch in row.get("batch_stats", ())]
    infer = sum(int(batch.get("compute_infer", {}).get("ns", 0)) for batch in batches) / 1e9
    return StageTotals(by_metric, infer)
