"""The overview of a server for the console: a row for each model version, totals, and the last hour of both.

The console calls it at every tick, on the event loop. Enumerations are iterators, so that the caller can run them in
time slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isnan, nan
from typing import Any, Final

import psutil

from conch.config.complete import CHAT_TEMPLATE
from conch.config.schema import implementation, is_ensemble
from conch.machine.memory import FreeMemory
from conch.repository.errors import without_directories
from conch.server.execution.ensemble import Ensemble
from conch.server.execution.starting import instances_of
from conch.server.model import Model
from conch.server.models.states import ModelTable, State
from conch.telemetry.history import Meter, SampleHistory

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

    def finish(self, now: float, wall: float, rows: Iterable[Row], free: FreeMemory | None) -> None:
        """Compute the totals from ``rows``, and add samples to the history if they are due.

        ``now`` is monotonic and ``wall`` since the epoch (s). Rates of the totals are those of clients: requests of
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
