"""Samples the NVIDIA GPUs of this machine during a measurement, with NVML (extra ``analyze``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from statistics import fmean
from typing import Any, Final, NamedTuple

from conch.machine.processes import family, process_times
from conch.measure.perf.senders.records import Span
from conch.measure.perf.server.resources import GpuFigures
from conch.measure.perf.server.sampling import Sampler

#: NVML averages utilization over a period between a sixth of a second and a second (s).
_INTERVAL: Final = 0.25


class GpuReading(NamedTuple):
    """The state of a GPU: fraction of busy time, memory in use (bytes), power (W)."""

    utilisation: float
    memory: int
    power: float


class GpuReader:
    """Reads all GPUs of this machine; there are none without the package or the driver."""

    def __init__(self, load_nvml: Callable[[], Any] = lambda: import_module("pynvml")) -> None:
        self._gpus: dict[str, Any] = {}
        try:
            self._nvml = nvml = load_nvml()
            nvml.nvmlInit()
            for number in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                self._gpus[uuid.decode() if isinstance(uuid, bytes) else uuid] = handle
        except Exception:  # ImportError, or any error of pynvml for a missing driver
            self._gpus = {}

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def read(self) -> Mapping[str, GpuReading]:
        """Return the state of every GPU by its UUID; unavailable values are 0."""
        nvml, readings = self._nvml, {}
        for uuid, gpu in self._gpus.items():
            rates, memory = (
                self._value(nvml.nvmlDeviceGetUtilizationRates, gpu),
                self._value(nvml.nvmlDeviceGetMemoryInfo, gpu),
            )
            power = self._value(nvml.nvmlDeviceGetPowerUsage, gpu)
            readings[uuid] = GpuReading(
                rates.gpu / 100 if rates else 0.0, int(memory.used) if memory else 0, (power or 0) / 1000
            )
        return readings

    def used_by(self, pids: Collection[int]) -> set[str]:
        """Return the GPUs used by any of the processes; empty if the driver does not report it, as in containers."""
        nvml = self._nvml
        return {
            uuid
            for uuid, gpu in self._gpus.items()
            if any(process.pid in pids for process in self._value(nvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ())
        }

    def _value(self, function: Callable[[Any], Any], gpu: Any) -> Any:
        try:
            return function(gpu)
        except self._nvml.NVMLError:
            return None


class GpuSampler(Sampler[Mapping[str, GpuReading]]):
    """Samples the GPUs while the context is entered."""

    def __init__(self, reader: GpuReader) -> None:
        super().__init__(reader.read, _INTERVAL)
        self._reader = reader

    def figures(self, spans: Sequence[Span], roots: Iterable[int]) -> dict[str, GpuFigures]:
        """Return the figures in ``spans`` of the GPUs that ``roots`` and their children use, or of all if unknown."""
        samples = self.within(spans)
        used = self._reader.used_by(family(process_times(), roots))
        names = [uuid for uuid in (samples[0] if samples else ()) if not used or uuid in used]
        return {uuid: _figures([sample[uuid] for sample in samples]) for uuid in names}


def _figures(readings: Sequence[GpuReading]) -> GpuFigures:
    return GpuFigures(
        fmean(reading.utilisation for reading in readings), max(reading.memory for reading in readings),
        fmean(reading.power for reading in readings),
    )  # fmt: skip
