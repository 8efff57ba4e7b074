"""The vocabulary of the memory ledger, and what the machine has left.

``ModelStatistics`` keeps a ``ModelMemory``, from which the statistics extension and the metrics page are served; the
ledger (``conch.server.memory``) measures it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from conch.telemetry.cgroups import limits

#: A limit of cgroup v1 that is as good as none.
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one model version has in memory (bytes), or several together.

    ``workers``: its worker processes and what they have started, each with its proportional share (Pss) of what it maps
    together with others, and without the shared regions.
    ``shared_regions``: the memory shared between the server and the workers, for large tensors.
    ``gpus``: of its workers on each GPU, by the driver's number.

    These add up.  The others are parts of them: ``weights`` the size of the weights' files, which is 0 where they are
    unknown; ``kv_cache`` what generation has stored in its KV cache, where its engine knows that.
    """

    workers: int = 0
    shared_regions: int = 0
    gpus: Mapping[int, int] = field(default_factory=dict)
    weights: int = 0
    kv_cache: int = 0

    @property
    def host(self) -> int:
        """Bytes of the machine's memory."""
        return self.workers + self.shared_regions

    @property
    def gpu(self) -> int:
        """Bytes on all GPUs together."""
        return sum(self.gpus.values())

    def kinds(self) -> dict[str, int]:
        """The values of the metric's label ``kind``, with their bytes; 0 is left out but for ``workers``."""
        kinds = {
            "workers": self.workers,
            "shared_regions": self.shared_regions,
            "gpu": self.gpu,
            "weights": self.weights,
            "kv_cache": self.kv_cache,
        }
        return {kind: size for kind, size in kinds.items() if size or kind == "workers"}

    def usage(self) -> list[dict[str, Any]]:
        """``memory_usage`` of the statistics extension: the machine's memory and that of each GPU; no empty entries."""
        entries = [("CPU", 0, self.host), *(("GPU", number, size) for number, size in sorted(self.gpus.items()))]
        return [{"type": type, "id": id, "byte_size": size} for type, id, size in entries if size]

    def sentence(self) -> str:
        """``412 MiB: workers 380 MiB, shared regions 32 MiB``, for the log.

        After the sum stands what is counted in it already: ``412 MiB (including weights 90 MiB): workers …``.  Weights'
        files that are larger than the sum are left out, as the worker does not have them in memory as they are.
        """
        whole = mebibytes(self.host) + (f" and {mebibytes(self.gpu)} of GPU memory" if self.gpu else "")
        kinds = self.kinds()
        included = {"weights": kinds.pop("weights", 0), "KV cache": kinds.pop("kv_cache", 0)}
        inside = [f"{name} {mebibytes(size)}" for name, size in included.items() if 0 < size <= self.host + self.gpu]
        within = f" (including {', '.join(inside)})" if inside else ""
        parts = [f"{kind.replace('_', ' ')} {mebibytes(size)}" for kind, size in kinds.items()]
        return f"{whole}{within}: {', '.join(parts)}"


def together(memories: Iterable[ModelMemory]) -> ModelMemory:
    """The sum of several."""
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


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What this process and its children may still take (bytes), and how much there is in all.

    ``available`` counts what the kernel would give back at once, such as files in its cache.  Where a control group
    leaves less than the machine has, both are the group's, and ``limited`` is True.
    """

    total: int
    available: int
    limited: bool = False


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """What the machine, or the control group of this process, has left; ``root`` is where ``proc`` and ``sys`` are.

    Raises OSError or ValueError where the kernel does not tell.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    found = FreeMemory(sizes["MemTotal"], sizes["MemAvailable"])
    limit = memory_limit(found.total, root)
    left = [int(left) for left in limits("memory", _left_v2, _left_v1, root)]
    if limit:
        found = replace(found, total=limit, limited=True)
    if left and min(left) < found.available:
        found = replace(found, available=max(0, min(left)), limited=True)
    return found


def usable_memory(root: Path = Path("/")) -> int:
    """The bytes of memory that this process may use at most: the machine's, or what a control group allows of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_limit(total, root) or total


def memory_limit(total: int, root: Path = Path("/")) -> int:
    """The least limit of a control group of this process (bytes) that is below ``total``; 0 where there is none."""
    found = limits("memory", lambda group: _number(group / "memory.max"), _limit_v1, root)
    return min((int(limit) for limit in found if limit < min(_UNLIMITED, total)), default=0)


def read_size(text: str, whole: int) -> int:
    """The bytes that ``text`` says: a number, one with a unit (``8GiB``, ``500MB``), or a share of ``whole`` (``80%``).

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(%|[KMGT]i?B?|B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(text)
    number, unit = float(match[1]), (match[2] or "").upper()
    if unit == "%":
        return int(number / 100 * whole)
    return int(number * (1024 if "I" in unit else 1000) ** (" KMGT".index(unit[0]) if unit not in ("", "B") else 0))


def mebibytes(size: int) -> str:
    """``412 MiB`` or ``13.5 GiB``."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 10 << 30 else f"{round(size / (1 << 20))} MiB"


def _limit_v1(group: Path) -> float | None:
    return _number(group / "memory.limit_in_bytes")


def _left_v2(group: Path) -> float | None:
    """The limit less what is used; files in the cache can be given back."""
    return _left(group, "memory.max", "memory.current", ("active_file", "inactive_file"))


def _left_v1(group: Path) -> float | None:
    names = ("total_active_file", "total_inactive_file")
    return _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", names)


def _left(group: Path, limit_file: str, usage_file: str, cached: tuple[str, ...]) -> float | None:
    limit, usage = _number(group / limit_file), _number(group / usage_file)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    try:
        pairs = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = sum(int(pairs[name]) for name in cached)
    except (OSError, KeyError, ValueError):
        reclaimable = 0
    return limit - usage + reclaimable


def _number(path: Path) -> float | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None
