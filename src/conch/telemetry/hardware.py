"""Metrics of the machine: CPU and memory through psutil, NVIDIA GPUs through pynvml where it is installed.

The registry calls ``collect`` for every scrape; the machine is read at most once per ``interval`` (seconds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from time import monotonic
from typing import Any, Final

from conch.telemetry.exposition import Family, Metric, MetricSample, label_text

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
    """Families that are read again when they are ``interval`` seconds old."""

    def __init__(self, interval: float, clock: Callable[[], float]) -> None:
        self._interval = interval
        self._clock = clock
        self._read_at = -interval
        self._families: list[Family] = []

    def collect(self) -> list[Family]:
        """The families as they were read last."""
        now = self._clock()
        if now - self._read_at >= self._interval:
            self._read_at = now
            self._families = list(self.read())
        return self._families

    def read(self) -> Iterator[Family]:
        """Read the machine."""
        raise NotImplementedError


class CpuGauges(_Polled):
    """The machine's CPU and memory; utilization is the average since the last reading, at first since the start."""

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
    """All NVIDIA GPUs that the driver shows; a value that a GPU does not have is left out.

    Raises ImportError without pynvml, and pynvml's errors without a driver; ``gpu_gauges`` handles both.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = monotonic, pynvml: Any = None) -> None:
        super().__init__(interval, clock)
        self._nvml = nvml = pynvml or import_module("pynvml")
        nvml.nvmlInit()
        self._gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._labels = [label_text({"gpu_uuid": _text(nvml.nvmlDeviceGetUUID(gpu))}) for gpu in self._gpus]
        self._energy_before = [self._value(nvml.nvmlDeviceGetTotalEnergyConsumption, gpu) or 0 for gpu in self._gpus]

    def read(self) -> Iterator[Family]:
        nvml = self._nvml
        memory = [self._value(nvml.nvmlDeviceGetMemoryInfo, gpu) for gpu in self._gpus]
        load = [self._value(nvml.nvmlDeviceGetUtilizationRates, gpu) for gpu in self._gpus]
        power = [self._value(nvml.nvmlDeviceGetPowerUsage, gpu) for gpu in self._gpus]
        limit = [self._value(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu) for gpu in self._gpus]
        energy = [self._value(nvml.nvmlDeviceGetTotalEnergyConsumption, gpu) for gpu in self._gpus]
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

    def _value(self, function: Callable[[Any], Any], gpu: Any) -> Any:
        try:
            return function(gpu)
        except self._nvml.NVMLError:
            return None


def gpu_gauges(interval: float) -> GpuGauges | None:
    """The gauges; None on a machine without pynvml or without a driver."""
    try:
        return GpuGauges(interval)
    except Exception:  # ImportError, or whatever pynvml says of a missing driver
        return None


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid
