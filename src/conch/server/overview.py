"""The overview of a server for the console: a row for each model version, totals, and the last hour of both.

The console calls it at every tick, on the event loop. Enumerations are iterators, so that the caller can run them in
time slices. ``Meter`` compares the statistics of a version now with those of earlier ticks, and ``SampleHistory`` keeps
a sample of each version at every tenth second. Both take the time (s) as an argument and use a fixed amount of memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil, isnan, nan
from operator import sub
from typing import Any, Final, NamedTuple

import psutil

from conch.config.complete import CHAT_TEMPLATE
from conch.config.schema import implementation, is_ensemble
from conch.machine.memory import FreeMemory
from conch.repository.errors import without_directories
from conch.server.execution.ensemble import Ensemble
from conch.server.execution.starting import instances_of
from conch.server.model import Model
from conch.server.models.states import ModelTable, State
from conch.telemetry.statistics import FINE_LATENCY_BUCKETS, ModelStatistics

Row = dict[str, Any]

#: The fields of the history of a model version, and those of the totals, which have the key ``TOTALS``.
FIELDS: Final = (
    "rate", "failures", "tokens", "p50", "p99", "queue", "in_flight", "memory", "cpu", "running", "waiting", "cache",
)  # fmt: skip
TOTALS: Final = ""


class Overview:
    """The rows and totals of all models in ``table``, and their history."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self.history = SampleHistory(FIELDS)
        self._meters: dict[int, Meter] = {}
        self._instances: dict[int, int] = {}
        self._cpu_before = psutil.cpu_times()
        self.totals: Row = {}

    def key(self, key: str, version: int | str = "") -> str:
        """Return the key of the row and the history of a version of the model with ``key``."""
        return f"{self._table.naming.public(key)}/{version}"

    def rows(self, now: float, directories: Iterable[str] = ()) -> Iterator[Row]:
        """Yield a row for each version in the table and for each other model in ``directories``.

        Compute the totals and the history with :meth:`finish` afterwards.
        """
        loaded = set()
        for key, model_state in list(self._table.models.items()):
            if not model_state.versions:
                reason = without_directories(model_state.reason)
                yield {**self._identify(key), "state": "UNAVAILABLE", "reason": reason}
            for version, version_state in sorted(model_state.versions.items()):
                state, reason = version_state.shown
                row: Row = {**self._identify(key, version), "version": version, "state": str(state)}
                if reason:
                    row["reason"] = without_directories(reason)
                model = version_state.model
                if model is not None:
                    loaded.add(model.serial)
                    row |= self._describe(model, now, ready=state is State.READY)
                yield row
        known = set(self._table.models)
        for key in directories:
            if key not in known:
                yield {**self._identify(key), "state": ""}
        for serial in self._meters.keys() - loaded:
            del self._meters[serial], self._instances[serial]

    def repository(self, key: str) -> int:
        """Return the number of the repository of the model with ``key``; 0 unless names may occur in several."""
        return self._table.naming.number(key)

    def _identify(self, key: str, version: int | str = "") -> Row:
        """Return the members of a row that tell it from all others."""
        row: Row = {"key": self.key(key, version), "name": self._table.naming.name(key)}
        if number := self.repository(key):
            row["repository"] = number
        return row

    def finish(self, wall: float, rows: Iterable[Row], free: FreeMemory | None) -> None:
        """Compute the totals from ``rows``, and add samples to the history if they are due.

        ``wall`` is the time since the epoch (s). Rates of the totals are those of clients: requests of
        ensembles to the models of their steps do not count.
        """
        active = [row for row in rows if "rate" in row]
        latencies = [(row["p99"], row["key"]) for row in active if row["p99"] is not None]
        slowest, slowest_key = max(latencies, default=(None, ""))
        self.totals = {
            "time": wall,
            "rate": round(max(sum(row["rate"] - row.get("step_rate", 0.0) for row in active), 0.0), 2),
            "failures": round(max(sum(row["failures"] - row.get("step_failures", 0.0) for row in active), 0.0), 3),
            "tokens": sum(row["tokens"] for row in active),
            "p99": slowest,
            "slowest": slowest_key,
            "queue": sum(row["queue"] for row in active),
            "in_flight": sum(row["in_flight"] for row in active),
            "memory": sum(row["memory"] for row in active),
            "machine_total": free.total if free is not None else 0,
            "machine_available": free.available if free is not None else 0,
            "cpu": self._cpu(),
        }
        if self.history.due(wall):
            samples = {row["key"]: [_number(row.get(field)) for field in FIELDS] for row in active}
            samples[TOTALS] = [_number(self.totals.get(field)) for field in FIELDS]
            self.history.add(wall, samples)

    def _describe(self, model: Model, now: float, *, ready: bool) -> Row:
        """Return the members of a row that only a loaded version has."""
        statistics = model.statistics
        meter = self._meters.get(model.serial)
        if meter is None:
            executor = model.executor
            counts = executor.step_counts if isinstance(executor, Ensemble) else lambda: (0, 0)
            meter = self._meters[model.serial] = Meter(statistics, counts)
            self._instances[model.serial] = sum(1 for _ in instances_of(model.config))
        recent = meter.read(now)
        facts = statistics.runtime_facts
        row = {
            "serial": model.serial,
            "responsive": ready and model.ready,
            "backend": "ensemble" if is_ensemble(model.config) else implementation(model.config),
            "engine": facts.get("engine", ""),
            "instances": self._instances[model.serial],
            "memory": statistics.memory.host + statistics.memory.gpu,
            "rate": round(recent.rate, 2),
            "failures": round(recent.failures, 3),
            "tokens": round(recent.tokens, 1),
            "p50": None if isnan(recent.p50) else round(recent.p50, 3),
            "p99": None if isnan(recent.p99) else round(recent.p99, 3),
            "queue": len(statistics.queue),
            "in_flight": model.in_flight,
            "succeeded": statistics.success_count,
            "failed": statistics.fail_count,
            "restarts": sum(statistics.restarts.values()),
        }
        if statistics.generation is not None:
            generation = statistics.generation
            row |= {"running": generation.running, "waiting": generation.waiting, "cache": generation.cache_usage}
        if isinstance(model.executor, Ensemble):
            row |= {"step_rate": round(recent.step_rate, 2), "step_failures": round(recent.step_failures, 3)}
        if facts.get(CHAT_TEMPLATE) == "yes":
            row["chat"] = True
        return row

    def _cpu(self) -> float:
        """Return the share of all cores in use since the last call, 0 to 1."""
        before, self._cpu_before = self._cpu_before, psutil.cpu_times()
        spent = [new - old for new, old in zip(self._cpu_before, before, strict=True)]
        names = self._cpu_before._fields
        # The time of guests is part of that of users.
        total = sum(seconds for name, seconds in zip(names, spent, strict=True) if not name.startswith("guest"))
        idle = sum(seconds for name, seconds in zip(names, spent, strict=True) if name in ("idle", "iowait"))
        return 1 - idle / total if total > 0 else 0.0


def _number(value: float | None) -> float:
    return nan if value is None else value


#: The period of latency quantiles, and that of rates (s).
LATENCY_SECONDS: Final = 60.0
RATE_SECONDS: Final = 10.0
#: Samples per series, one per ``SAMPLE_SECONDS``: an hour.
SAMPLES: Final = 360
SAMPLE_SECONDS: Final = 10.0
#: Maximum number of series groups; each takes ``SAMPLES`` numbers of 4 bytes for each field.
MOST_SERIES: Final = 256


class Recent(NamedTuple):
    """The recent activity of a version: rates per second, latencies in ms (NaN without requests).

    ``step_rate`` and ``step_failures`` are those of the requests that an ensemble has sent to the models of its steps.
    """

    rate: float = 0.0
    failures: float = 0.0
    tokens: float = 0.0
    step_rate: float = 0.0
    step_failures: float = 0.0
    p50: float = nan
    p99: float = nan


class _Mark(NamedTuple):
    """Counts at a time: requests, failures, generated tokens, requests of steps and their failures; and latencies."""

    time: float
    counts: tuple[int, int, int, int, int]
    latencies: tuple[int, ...]


class Meter:
    """Computes the recent rates and latencies of one version; call :meth:`read` at every tick.

    ``steps`` returns the numbers of ended and of failed requests of the steps of an ensemble.
    """

    def __init__(self, statistics: ModelStatistics, steps: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        self.statistics = statistics
        self._steps = steps
        self._marks: deque[_Mark] = deque()

    def read(self, now: float) -> Recent:
        """Return the rates of the last ``RATE_SECONDS`` and the latencies of the last ``LATENCY_SECONDS``."""
        mark = self._mark(now)
        marks = self._marks
        marks.append(mark)
        while len(marks) > 2 and marks[1].time <= now - LATENCY_SECONDS:
            marks.popleft()
        start = next((earlier for earlier in marks if earlier.time >= now - RATE_SECONDS), mark)
        seconds = now - start.time or 1.0
        rates = [(after - before) / seconds for before, after in zip(start.counts, mark.counts, strict=True)]
        rate, failures, tokens, step_rate, step_failures = rates
        p50, p99 = _quantiles(marks[0].latencies, mark.latencies)
        return Recent(rate, failures, tokens, step_rate, step_failures, p50, p99)

    def _mark(self, now: float) -> _Mark:
        statistics, latency = self.statistics, self.statistics.fine_latency
        succeeded, failed = statistics.success_count, statistics.fail_count
        tokens = statistics.generation.generated_tokens if statistics.generation is not None else 0
        counts = (succeeded + failed, failed, tokens, *self._steps())
        if self._marks and self._marks[-1].counts == counts:
            return _Mark(now, counts, self._marks[-1].latencies)  # shared, so that an idle version takes little memory
        return _Mark(now, counts, latency.counts if latency is not None else ())


def _quantiles(before: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
    """Return the median and the 0.99 quantile (ms) of the observations between two readings of a histogram."""
    cumulative = list(accumulate(map(sub, after, before)))
    if not cumulative or not cumulative[-1]:
        return nan, nan
    return _quantile(cumulative, 0.5), _quantile(cumulative, 0.99)


def _quantile(cumulative: Sequence[int], rank: float) -> float:
    """Return the geometric mean of the bounds of the bucket with this rank (nearest rank), in ms."""
    bucket = bisect_left(cumulative, max(ceil(rank * cumulative[-1]), 1))
    upper = FINE_LATENCY_BUCKETS[min(bucket, len(FINE_LATENCY_BUCKETS) - 1)]
    lower = FINE_LATENCY_BUCKETS[bucket - 1] if bucket else upper
    return float((lower * upper) ** 0.5 / 1000)


class SampleHistory:
    """Samples of several series by key, each with the same ``fields``; missing samples are NaN.

    If there are more than ``MOST_SERIES`` keys, those whose last sample is oldest are forgotten.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        self._times = array("d", [nan]) * SAMPLES
        self._series: dict[str, list[array[float]]] = {}
        self._last: dict[str, int] = {}
        self._count = 0

    def due(self, now: float) -> bool:
        """Whether the next samples are due at ``now`` (s since the epoch)."""
        return not self._count or now - self._times[(self._count - 1) % SAMPLES] >= SAMPLE_SECONDS - 0.5

    def add(self, now: float, samples: Mapping[str, Sequence[float]]) -> None:
        """Add the samples of one time, with a value for each field."""
        at = self._count % SAMPLES
        self._times[at] = now
        for key in samples:
            if key not in self._series:
                self._series[key] = [array("f", [nan]) * SAMPLES for _ in self.fields]
            self._last[key] = self._count
        for key, arrays in self._series.items():
            values = samples.get(key, ())
            for index, values_of_field in enumerate(arrays):
                values_of_field[at] = values[index] if values else nan
        self._count += 1
        self._forget()

    def series(self, key: str) -> dict[str, list[float]]:
        """Return the times (s since the epoch) and the values of each field, oldest first; empty for an unknown key."""
        arrays = self._series.get(key)
        if arrays is None:
            return {}
        start = self._count % SAMPLES if self._count > SAMPLES else 0
        order = [(start + offset) % SAMPLES for offset in range(min(self._count, SAMPLES))]
        columns = dict(zip(self.fields, arrays, strict=True))
        return {name: [values[at] for at in order] for name, values in (("time", self._times), *columns.items())}

    def _forget(self) -> None:
        oldest = sorted(self._last, key=self._last.__getitem__)
        for key in oldest:
            if len(self._series) <= MOST_SERIES and self._last[key] >= self._count - SAMPLES:
                break
            del self._series[key], self._last[key]
