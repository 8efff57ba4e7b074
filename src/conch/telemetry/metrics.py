"""The metrics page, and the registry of its content.

:mod:`conch.library.app` makes one ``Registry``. The server takes the ``ModelStatistics`` of each model version from it,
registers them when the version starts serving and unregisters them when it has ended; the metrics port renders the
page. Everything runs on the event loop. Values are read when the page is rendered, so recording does not depend on
the page. The registry calls ``collect`` for every scrape, but the machine is read at most once per ``interval`` (s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from time import monotonic
from typing import Any, Final

from conch.core.errors import invalid
from conch.machine.gpus import Gpus
from conch.telemetry import families
from conch.telemetry.custom import CustomMetrics
from conch.telemetry.exposition import Family, Metric, MetricSample, label_text, page, page_lines
from conch.telemetry.families import Registered
from conch.telemetry.statistics import (
    FINE_LATENCY_BUCKETS,
    FIRST_RESPONSE,
    Histogram,
    LatencyHistograms,
    ModelStatistics,
    Summaries,
)

CPU_UTILIZATION: Final = Metric("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]")
CPU_MEMORY_TOTAL: Final = Metric("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes")
CPU_MEMORY_USED: Final = Metric("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes")

GPU_UTILIZATION: Final = Metric("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)")
GPU_MEMORY_TOTAL: Final = Metric("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes")
GPU_MEMORY_USED: Final = Metric("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes")
GPU_POWER_USAGE: Final = Metric("nv_gpu_power_usage", "gauge", "GPU power usage in watts")
GPU_POWER_LIMIT: Final = Metric("nv_gpu_power_limit", "gauge", "GPU power management limit in watts")
GPU_ENERGY: Final = Metric(
    "nv_energy_consumption", "counter", "GPU energy consumption in joules since the Triton Server started"
)


class _Polled:
    """Families that are cached for ``interval`` seconds."""

    def __init__(self, interval: float, clock: Callable[[], float]) -> None:
        self._interval = interval
        self._clock = clock
        self._read_at = -interval
        self._families: list[Family] = []

    def collect(self) -> list[Family]:
        """Return the families, read again if the cached ones are too old."""
        now = self._clock()
        if now - self._read_at >= self._interval:
            self._read_at = now
            self._families = list(self.read())
        return self._families

    def read(self) -> Iterator[Family]:
        """Yield newly read families."""
        raise NotImplementedError


class CpuGauges(_Polled):
    """Gauges of CPU and memory. Utilization is the average since the previous reading, at first since the start."""

    def __init__(self, interval: float, clock: Callable[[], float] = monotonic, psutil: Any = None) -> None:
        super().__init__(interval, clock)
        self._psutil = psutil or import_module("psutil")
        self._psutil.cpu_percent(None)

    def read(self) -> Iterator[Family]:
        memory = self._psutil.virtual_memory()
        yield CPU_UTILIZATION, [MetricSample("", self._psutil.cpu_percent(None) / 100)]
        yield CPU_MEMORY_TOTAL, [MetricSample("", memory.total)]
        yield CPU_MEMORY_USED, [MetricSample("", memory.total - memory.available)]


class GpuGauges(_Polled):
    """Gauges of all NVIDIA GPUs visible to the driver; values that a GPU does not report are omitted."""

    def __init__(self, interval: float, clock: Callable[[], float] = monotonic, gpus: Gpus | None = None) -> None:
        super().__init__(interval, clock)
        self.gpus = gpus = gpus or Gpus()
        self._labels = [label_text({"gpu_uuid": gpus.uuid(gpu)}) for gpu in gpus.handles]
        self._energy_before = [energy or 0 for energy in self._values("TotalEnergyConsumption")]

    def read(self) -> Iterator[Family]:
        memory, load = self._values("MemoryInfo"), self._values("UtilizationRates")
        power, limit = self._values("PowerUsage"), self._values("EnforcedPowerLimit")
        energy = self._values("TotalEnergyConsumption")
        since = [None if now is None else now - before for now, before in zip(energy, self._energy_before, strict=True)]
        yield GPU_UTILIZATION, self._samples(load, lambda rates: rates.gpu / 100)
        yield GPU_MEMORY_TOTAL, self._samples(memory, lambda info: info.total)
        yield GPU_MEMORY_USED, self._samples(memory, lambda info: info.used)
        yield GPU_POWER_USAGE, self._samples(power, lambda milliwatts: milliwatts / 1000)
        yield GPU_POWER_LIMIT, self._samples(limit, lambda milliwatts: milliwatts / 1000)
        yield GPU_ENERGY, self._samples(since, lambda millijoules: millijoules / 1000)

    def _samples(self, values: list[Any], convert: Callable[[Any], float]) -> list[MetricSample]:
        labelled = zip(self._labels, values, strict=True)
        return [MetricSample(labels, convert(value)) for labels, value in labelled if value is not None]

    def _values(self, query: str) -> list[Any]:
        return [self.gpus.read(query, gpu) for gpu in self.gpus.handles]


def gpu_gauges(interval: float) -> GpuGauges | None:
    """Return the gauges; None without pynvml or without a driver."""
    gauges = GpuGauges(interval)
    return gauges if gauges.gpus.error is None else None


FIRST_RESPONSE_BUCKETS: Final = (100.0, 500.0, 2000.0, 5000.0)
QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)

#: Always 0, because workers have their own memory and the server pins none.
PINNED_MEMORY: Final[tuple[Family, ...]] = (
    (
        Metric("nv_pinned_memory_pool_total_bytes", "gauge", "Pinned memory pool total memory size, in bytes"),
        (MetricSample("", 0),),
    ),
    (
        Metric("nv_pinned_memory_pool_used_bytes", "gauge", "Pinned memory pool used memory size, in bytes"),
        (MetricSample("", 0),),
    ),
)


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The latency distributions to keep, from ``--metrics-config``."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = QUANTILES

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> MetricsConfig:
        """Parse the option's keys and values; unknown keys are ignored, as in Triton.

        Raises INVALID_ARG for quantiles not of the form ``<quantile>:<error>,...``. The errors are unused, because
        quantiles are exact.
        """
        return cls(
            counter_latencies=settings.get("counter_latencies", "true").lower() == "true",
            summary_latencies=settings.get("summary_latencies", "false").lower() == "true",
            histogram_latencies=settings.get("histogram_latencies", "false").lower() == "true",
            quantiles=_quantiles(settings["summary_quantiles"]) if "summary_quantiles" in settings else QUANTILES,
        )


class Registry:
    """The content of the metrics page.

    ``cpu`` and ``gpu`` enable gauges of the machine, which is read at most twice per ``interval_ms``, as in Triton.
    ``cache`` is True if the server has a response cache. With ``latencies``, all models record the latencies of their
    requests, which the page does not show.
    """

    def __init__(
        self,
        config: MetricsConfig = MetricsConfig(),
        *,
        latencies: bool = False,
        cpu: bool = True,
        gpu: bool = True,
        cache: bool = True,
        interval_ms: float = 2000.0,
    ) -> None:
        self.config = config
        self._latencies = latencies
        self._cache = cache
        #: Called before each page; work that it starts may affect only later pages.
        self.before_rendering: Callable[[], None] = lambda: None
        self._models: dict[tuple[str, ...], Registered] = {}
        self._collectors: list[Callable[[], Iterable[Family]]] = []
        #: Custom metrics of models.
        self.custom = CustomMetrics({metric.name: metric.type for metric in families.GENERATION})
        interval = interval_ms / 2 / 1000
        gpus = gpu_gauges(interval) if gpu else None
        if gpus is not None:
            self.add(gpus.collect)
        if cpu:
            self.add(CpuGauges(interval).collect)

    def statistics(
        self, name: str, version: int, *, decoupled: bool = False, buckets: Mapping[str, Sequence[float]] = {}
    ) -> ModelStatistics:
        """Return new statistics for a model version, with the configured distributions.

        First responses are recorded for decoupled models. ``buckets`` are the ascending upper bounds (ms) of
        histograms by family, from the model's ``model_metrics``.
        """
        histograms = self.config.histogram_latencies
        first_response = Histogram(buckets.get(FIRST_RESPONSE) or FIRST_RESPONSE_BUCKETS)
        return ModelStatistics(
            name,
            version,
            summaries=Summaries() if self.config.summary_latencies else None,
            latencies=LatencyHistograms(buckets) if histograms else None,
            first_response=first_response if histograms and decoupled else None,
            fine_latency=Histogram(FINE_LATENCY_BUCKETS) if self._latencies else None,
        )

    def register(
        self,
        statistics: ModelStatistics,
        *,
        tags: Mapping[str, str] | None = None,
        namespace: str = "",
        cached: bool = False,
    ) -> None:
        """Show a model version, replacing an earlier load of the same version.

        ``tags`` are the model's ``metric_tags``; ``cached`` means that it uses the response cache.
        """
        labels = {"model": statistics.name, "version": str(statistics.version)}
        labels |= {f"_{tag}": value for tag, value in (tags or {}).items()}
        labels |= {"namespace": namespace} if namespace else {}
        self._models[_key(statistics, namespace)] = Registered(
            statistics, dict(sorted(labels.items())), cached, self.config.quantiles
        )

    def unregister(self, statistics: ModelStatistics, *, namespace: str = "") -> None:
        """Stop showing a model version, unless a later load of the same version has replaced it."""
        key = _key(statistics, namespace)
        if key in self._models and self._models[key].statistics is statistics:
            del self._models[key]

    def add(self, collect: Callable[[], Iterable[Family]]) -> None:
        """Add a collector, which is called for every scrape."""
        self._collectors.append(collect)

    def render(self) -> bytes:
        """Return the page in Prometheus text format."""
        self.before_rendering()
        return page(self.custom.joined(self._families(list(self._models.values()))))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page, so that callers can pause: rendering a thousand models takes long."""
        self.before_rendering()
        return page_lines(self.custom.joined(self._families(list(self._models.values()))))

    def _families(self, models: Sequence[Registered]) -> Iterator[Family]:
        yield from _of_models(models, families.COUNTS)
        if self.config.counter_latencies:
            yield from _of_models(models, families.DURATIONS)
        if self._cache:
            yield from _of_models(models, families.CACHE)
        yield from _of_models(models, families.GAUGES)
        if self.config.histogram_latencies:
            yield from _of_models(models, families.HISTOGRAMS)
        yield from PINNED_MEMORY
        yield from _of_models(models, families.RESTARTS)
        for table in (families.MEMORY, families.WORK, families.GENERATION):
            for metric, samples in _of_models(models, table):
                for first in samples:  # families without samples are omitted
                    yield metric, chain([first], samples)
                    break
        for collect in self._collectors:
            yield from collect()
        if self.config.summary_latencies:
            yield from _of_models(models, families.SUMMARIES)
            if self._cache:
                yield from _of_models(models, families.CACHE_SUMMARIES)


def _of_models(models: Sequence[Registered], table: families.Table) -> Iterator[tuple[Metric, Iterator[MetricSample]]]:
    for metric, read in table.items():
        yield metric, chain.from_iterable(map(read, models))


def _key(statistics: ModelStatistics, namespace: str) -> tuple[str, ...]:
    return namespace, statistics.name, str(statistics.version)


def _quantiles(text: str) -> tuple[float, ...]:
    try:
        pairs = [tuple(map(float, pair.split(":"))) for pair in text.split(",")]
        quantiles = tuple(quantile for quantile, _ in pairs)
    except ValueError:
        quantiles = (-1.0,)
    if not all(0 <= quantile <= 1 for quantile in quantiles):
        raise invalid(f"--metrics-config summary_quantiles is <quantile>:<error>,... from 0 to 1. Got {text}")
    return quantiles
