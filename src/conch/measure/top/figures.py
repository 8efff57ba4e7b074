"""The figures of models between two readings of the metrics page: rates, percentiles and means.

Pure: times are passed in (s, any clock).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from conch.measure.perf.server.statistics import SERVER_STAGES
from conch.measure.top.counts import Buckets, ModelCounts, ModelKey, ServerCounts

#: Rates and percentiles cover this time (s).
WINDOW: Final = 10.0
#: Charts have this many points.
POINTS: Final = 300


@dataclass(frozen=True, slots=True)
class TopModel:
    """The figures of a model version; durations are in ms, rates per second, None if unknown or without requests.

    ``state`` is that of the repository index, or ``NOT READY`` if the workers of a loaded model cannot run requests.
    ``parts`` are the mean durations by part. ``history`` are past request rates, oldest first.
    """

    name: str
    version: str
    state: str
    reason: str = ""
    rate: float | None = None
    failing: float | None = None
    failures: Mapping[str, float] = field(default_factory=dict)
    median: float | None = None
    p99: float | None = None
    mean: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    batch: float | None = None
    waiting: float | None = None
    instances: int | None = None
    memory: float | None = None
    memory_by_kind: Mapping[str, float] = field(default_factory=dict)
    restarts: float | None = None
    restarts_by_reason: Mapping[str, float] = field(default_factory=dict)
    tokens: float | None = None
    generation: Mapping[str, float] = field(default_factory=dict)
    first_token: float | None = None
    inter_token: float | None = None
    cache_hits: float | None = None
    history: Sequence[float] = ()

    @property
    def key(self) -> ModelKey:
        return self.name, self.version

    @property
    def loaded(self) -> bool:
        return self.state in ("READY", "NOT READY")


class ModelHistory:
    """The readings of a model version within the window, and its past request rates."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, ModelCounts]] = deque()
        self.rates: deque[float] = deque(maxlen=POINTS)

    def add(self, now: float, counts: ModelCounts) -> None:
        """Add a reading; forgets earlier ones if a counter has become smaller, because the model was loaded again."""
        if self._readings and counts.totals["success"] < self._readings[-1][1].totals["success"]:
            self._readings.clear()
        if self._readings:
            then, last = self._readings[-1]
            self.rates.append((counts.totals["success"] - last.totals["success"]) / max(now - then, 1e-9))
        self._readings.append((now, counts))
        while len(self._readings) > 2 and now - self._readings[1][0] >= WINDOW:
            self._readings.popleft()

    def figures(self, key: ModelKey, state: str, reason: str, instances: int | None) -> TopModel:
        """Return the figures of the window."""
        then, first = self._readings[0]
        now, last = self._readings[-1]
        if last.ready is False and state == "READY":
            state = "NOT READY"
        known = TopModel(
            *key,
            state or ("READY" if last.ready is not False else "NOT READY"),
            reason,
            waiting=max(last.waiting, last.generation.get("waiting", 0.0)),
            instances=instances,
            memory=last.bytes,
            memory_by_kind=last.memory or {},
            restarts=None if last.restarts is None else sum(last.restarts.values()),
            restarts_by_reason=last.restarts or {},
            failures=dict(last.failures),
            generation=last.generation,
            history=tuple(self.rates),
        )
        return known if now <= then else _between(known, first, last, now - then)


def _between(known: TopModel, first: ModelCounts, last: ModelCounts, seconds: float) -> TopModel:
    """Return the figures ``known`` with those of the ``seconds`` between two readings."""
    grown = {name: total - first.totals[name] for name, total in last.totals.items()}
    requests = grown.get("success", 0.0)
    failed = sum(last.failures.values()) - sum(first.failures.values())
    tokens = grown.get("generated_tokens", 0.0) or grown.get("tokens", 0.0)
    looked_up = grown.get("cache_hits", 0.0) + grown.get("cache_misses", 0.0)
    request = _grown(first, last, "request") or _grown(first, last, "generation")
    return replace(
        known,
        rate=requests / seconds,
        failing=failed / seconds,
        median=quantile(0.5, request) if request else last.quantiles.get(0.5) if requests else None,
        p99=quantile(0.99, request) if request else last.quantiles.get(0.99) if requests else None,
        mean=grown.get("request", 0.0) / requests / 1000 if requests else None,
        parts={part: grown.get(part, 0.0) / requests / 1000 for part in SERVER_STAGES} if requests else {},
        # Failed executions have no inferences.
        batch=max(1.0, grown["inferences"] / grown["executions"]) if grown.get("executions") else None,
        tokens=tokens / seconds if tokens or known.generation else None,
        first_token=quantile(0.5, _grown(first, last, "first_token")),
        inter_token=quantile(0.5, _grown(first, last, "inter_token")),
        cache_hits=grown["cache_hits"] / looked_up if looked_up else None,
    )


def _grown(first: ModelCounts, last: ModelCounts, histogram: str) -> Buckets:
    """Return the increase of the buckets of a histogram; empty without observations."""
    before = first.buckets.get(histogram, {})
    grown = {bound: count - before.get(bound, 0.0) for bound, count in last.buckets.get(histogram, {}).items()}
    return grown if any(grown.values()) else {}


def quantile(rank: float, buckets: Mapping[float, float]) -> float | None:
    """Return a quantile of cumulative ``buckets``, interpolated within one, as Prometheus does; None if there are none.

    A quantile above the last finite bound is that bound.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    sought = rank * buckets[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= sought:
            if bound == inf:
                return low
            return low + (bound - low) * (sought - below) / max(buckets[bound] - below, 1e-9)
        low, below = bound, buckets[bound]
    return low


@dataclass(frozen=True, slots=True)
class TopServer:
    """The figures of a server: its models, sums over them, and those of the machine (shares of 1); None if unknown."""

    models: Sequence[TopModel]
    cpu: float | None = None
    memory: float | None = None
    gpu: float | None = None

    @property
    def rate(self) -> float:
        return sum(model.rate or 0.0 for model in self.models)

    @property
    def failing(self) -> float:
        return sum(model.failing or 0.0 for model in self.models)

    @property
    def waiting(self) -> float:
        return sum(model.waiting or 0.0 for model in self.models)

    @property
    def ready(self) -> int:
        return sum(model.state == "READY" for model in self.models)

    @property
    def model_memory(self) -> float | None:
        known = [model.memory for model in self.models if model.memory is not None]
        return sum(known) if known else None


class ServerHistory:
    """The readings of a server; ``rates`` are its past request rates, oldest first."""

    def __init__(self) -> None:
        self._models: dict[ModelKey, ModelHistory] = {}
        self.rates: deque[float] = deque(maxlen=POINTS)

    def add(
        self,
        now: float,
        counts: ServerCounts,
        index: Sequence[Mapping[str, str]],
        instances: Mapping[str, int],
    ) -> TopServer:
        """Add a reading and return the figures; ``index`` is the repository index, empty if the server has none.

        ``instances`` are the numbers of instances by model, as far as known.
        """
        states = {(entry["name"], entry.get("version", "")): entry for entry in index}
        self._models = {key: self._models.get(key) or ModelHistory() for key in counts.models}
        models = []
        for key, history in self._models.items():
            history.add(now, counts.models[key])
            entry = states.pop(key, {})
            models.append(history.figures(key, entry.get("state", ""), entry.get("reason", ""), instances.get(key[0])))
        # Without a state, a model of the repository that was never loaded.
        models += [
            TopModel(entry["name"], entry.get("version", ""), entry.get("state") or "UNLOADED", entry.get("reason", ""))
            for entry in states.values()
        ]
        gauges = counts.gauges
        total = gauges.get("nv_cpu_memory_total_bytes")
        figures = TopServer(
            sorted(models, key=lambda model: model.key),
            gauges.get("nv_cpu_utilization"),
            gauges.get("nv_cpu_memory_used_bytes", 0.0) / total if total else None,
            gauges.get("nv_gpu_utilization"),
        )
        self.rates.append(figures.rate)
        return figures
