"""The resources that a server uses during a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """The figures of a GPU: average utilization (0 to 1), maximum memory in use (bytes), average power (W)."""

    utilisation: float
    memory: int
    power: float = 0.0


@dataclass(frozen=True, slots=True)
class ResourceFigures:
    """The server with all its processes: average ``cores``, maximum resident ``memory`` (bytes), and GPUs by UUID.

    Memory shared by processes counts once (sum of their proportional set sizes).
    """

    cores: float
    memory: int
    gpus: Mapping[str, GpuFigures] = field(default_factory=dict)

    @property
    def gpu_memory(self) -> int:
        """Memory in use on all GPUs (bytes)."""
        return sum(gpu.memory for gpu in self.gpus.values())


@dataclass(frozen=True, slots=True)
class MetricFigures:
    """The average and the largest value of a server metric."""

    average: float
    largest: float
