"""What a server uses of its machine while it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """One GPU: its share of busy time (0 to 1) on average, its memory in use at most (bytes), its power (W)."""

    utilisation: float
    memory: int
    power: float = 0.0


@dataclass(frozen=True, slots=True)
class ResourceFigures:
    """The server and all its processes: ``cores`` used on average, ``memory`` resident at most (bytes), and the GPUs
    by their UUID.

    Memory that processes share counts once (the sum of their proportional shares).
    """

    cores: float
    memory: int
    gpus: Mapping[str, GpuFigures] = field(default_factory=dict)

    @property
    def gpu_memory(self) -> int:
        """Memory in use on all GPUs together (bytes)."""
        return sum(one.memory for one in self.gpus.values())


@dataclass(frozen=True, slots=True)
class MetricFigures:
    """A metric of the server: its average and its largest value."""

    average: float
    largest: float
