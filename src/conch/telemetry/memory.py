"""The memory of models.

``ModelStatistics`` keeps a ``ModelMemory``, which the statistics extension and the metrics page report. The ledger
(``conch.server.models.memory``) measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conch.machine.memory import mebibytes


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model version, or of several together (bytes).

    ``workers`` is the proportional share (Pss) of worker processes and their descendants, without shared regions.
    ``shared_regions`` is the memory shared between the server and the workers, for large tensors. ``gpus`` is the
    workers' memory on each GPU, by the driver's number.

    The total is the sum of these three. The other fields are parts of it: ``weights`` is the size of the weight files,
    0 if unknown; ``kv_cache`` is the memory that generation uses in its KV cache, if the engine reports it.
    """

    workers: int = 0
    shared_regions: int = 0
    gpus: Mapping[int, int] = field(default_factory=dict)
    weights: int = 0
    kv_cache: int = 0

    @property
    def host(self) -> int:
        """Host memory (bytes)."""
        return self.workers + self.shared_regions

    @property
    def gpu(self) -> int:
        """Memory on all GPUs (bytes)."""
        return sum(self.gpus.values())

    def kinds(self) -> dict[str, int]:
        """Return the bytes for each value of the metric label ``kind``; zeros are omitted except for ``workers``."""
        kinds = {
            "workers": self.workers,
            "shared_regions": self.shared_regions,
            "gpu": self.gpu,
            "weights": self.weights,
            "kv_cache": self.kv_cache,
        }
        return {kind: size for kind, size in kinds.items() if size or kind == "workers"}

    def usage(self) -> list[dict[str, Any]]:
        """Return ``memory_usage`` of the statistics extension: non-zero memory of the host and of each GPU."""
        entries = [("CPU", 0, self.host), *(("GPU", number, size) for number, size in sorted(self.gpus.items()))]
        return [{"type": type, "id": id, "byte_size": size} for type, id, size in entries if size]

    def sentence(self) -> str:
        """Return a log text such as ``412 MiB: workers 380 MiB, shared regions 32 MiB``.

        Parts of the total follow it in brackets: ``412 MiB (including weights 90 MiB): workers …``. Weight files
        larger than the total are omitted, because the worker does not hold them in memory unchanged.
        """
        whole = mebibytes(self.host) + (f" and {mebibytes(self.gpu)} of GPU memory" if self.gpu else "")
        kinds = self.kinds()
        included = {"weights": kinds.pop("weights", 0), "KV cache": kinds.pop("kv_cache", 0)}
        inside = [f"{name} {mebibytes(size)}" for name, size in included.items() if 0 < size <= self.host + self.gpu]
        within = f" (including {', '.join(inside)})" if inside else ""
        parts = [f"{kind.replace('_', ' ')} {mebibytes(size)}" for kind, size in kinds.items()]
        return f"{whole}{within}: {', '.join(parts)}"


def total_memory(memories: Iterable[ModelMemory]) -> ModelMemory:
    """Return the sum of several ``ModelMemory`` objects."""
    total = ModelMemory()
    for memory in memories:
        gpus = {gpu: total.gpus.get(gpu, 0) + memory.gpus.get(gpu, 0) for gpu in {*total.gpus, *memory.gpus}}
        total = replace(
            total,
            workers=total.workers + memory.workers,
            shared_regions=total.shared_regions + memory.shared_regions,
            gpus=gpus,
            weights=total.weights + memory.weights,
            kv_cache=total.kv_cache + memory.kv_cache,
        )
    return total
