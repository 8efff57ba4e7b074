"""Counts and metrics of load on demand.

The state machine of load on demand updates the counts; the registry collects the metrics for every scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from conch.telemetry.exposition import Family, Metric, MetricSample, label_text


@dataclass(slots=True)
class DemandCounts:
    """Counts of one model: loads, failed loads, evictions, and requests that waited for it.

    ``returns`` counts loads soon after an eviction. ``waited`` is the total waiting time (s). ``refused`` counts
    requests that failed because the model was not loaded.
    """

    loads: int = 0
    failures: int = 0
    evictions: int = 0
    returns: int = 0
    waits: int = 0
    waited: float = 0.0
    refused: int = 0


@dataclass(slots=True)
class OnDemandCounts:
    """Counts of all models that are or were in the repository, by name."""

    models: dict[str, DemandCounts] = field(default_factory=dict)

    def of(self, name: str) -> DemandCounts:
        return self.models.setdefault(name, DemandCounts())


_Read = Callable[[DemandCounts], float]

# fmt: off
OF_MODELS: Final[Mapping[Metric, _Read]] = {
    Metric("conch_demand_loads", "counter", "Number of loads caused by requests for the model"):
        lambda counts: counts.loads,
    Metric("conch_demand_load_failures", "counter", "Number of loads on demand that failed"):
        lambda counts: counts.failures,
    Metric("conch_demand_returns", "counter", "Number of loads on demand within a minute of the model's eviction"):
        lambda counts: counts.returns,
    Metric("conch_demand_evictions", "counter", "Number of times that the model was evicted"):
        lambda counts: counts.evictions,
    Metric("conch_demand_waits", "counter", "Number of requests that waited for the model to be loaded"):
        lambda counts: counts.waits,
    Metric("conch_demand_wait_duration_us", "counter", "Cumulative time that requests waited for the model "
                                                       "to be loaded in microseconds"):
        lambda counts: int(counts.waited * 1e6),
    Metric("conch_demand_refused", "counter", "Number of requests that were refused because the model was not loaded"):
        lambda counts: counts.refused,
}
# fmt: on
LOADED: Final = Metric("conch_demand_loaded_models", "gauge", "Number of models that are loaded")
WAITING: Final = Metric("conch_demand_waiting_requests", "gauge", "Number of requests that wait for models")


def families(counts: OnDemandCounts, loaded: int, waiting: int) -> Iterator[Family]:
    """Yield the families of all models that were loaded on demand or waited for."""
    for metric, read in OF_MODELS.items():
        of_models = sorted(counts.models.items())
        yield metric, [MetricSample(label_text({"model": name}), read(model)) for name, model in of_models]
    yield LOADED, [MetricSample("", loaded)]
    yield WAITING, [MetricSample("", waiting)]
