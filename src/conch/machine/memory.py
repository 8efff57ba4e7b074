"""Memory: of the machine or its control group, and of processes on the host and on NVIDIA GPUs.

Control groups are read in versions 1 and 2: their limits, and the time for which they throttled a process.
``resident_bytes`` takes microseconds. A ``ProcessReader`` makes the kernel walk all pages of a process, which takes
milliseconds per gigabyte, so the server calls it in a thread.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final

from conch.machine.gpus import Gpus

#: Reads a limit from a group's folder; None if the group sets none.
Read = Callable[[Path], float | None]


def limits(controller: str, v2: Read, v1: Read, root: Path = Path("/"), process: int | str = "self") -> Iterator[float]:
    """Yield the limits of ``controller`` for the process's group and all parent groups.

    ``root`` is the folder that contains ``proc`` and ``sys``. Yields nothing without control groups.
    """
    try:
        lines = (root / "proc" / str(process) / "cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Inside a container the path may be the host's, while the process's own group is the mount itself.
        groups = dict.fromkeys(part.strip("/") for part in (path, *map(str, PurePosixPath(path).parents), "/"))
        if not controllers:
            bounds = [v2(mounted / group) for group in groups]
        elif controller in controllers.split(","):
            bounds = [v1(mounted / mount / group) for mount in {controllers, controller} for group in groups]
        else:
            continue
        yield from (limit for limit in bounds if limit is not None)


def heap_trim() -> Callable[[], object] | None:
    """Return a function that returns unused memory of the heap to the kernel; None if the C library has none."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return lambda: malloc_trim(0)


def seconds_throttled(process: int | str = "self", root: Path = Path("/")) -> float:
    """Return the throttled time of the control groups of ``process`` and their parents, over all processors (s).

    A group is throttled while its CPU quota is used up. The time counts from the creation of each group. Source:
    ``throttled_usec`` of ``cpu.stat`` (``throttled_time`` in version 1 of control groups); 0 if missing.
    """
    return sum(
        limits(
            "cpu",
            lambda group: _read(group, "throttled_usec", 1e-6),
            lambda group: _read(group, "throttled_time", 1e-9),
            root,
            process,
        )
    )


def _read(group: Path, name: str, unit: float) -> float | None:
    try:
        lines = (group / "cpu.stat").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * unit for line in lines if line.startswith(f"{name} ")), None)


#: Limits of cgroup v1 from this size (bytes) mean no limit.
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The memory that this process and its children may still use, and the total (bytes).

    ``available`` includes memory that the kernel can reclaim at once, such as its file cache. If a control group sets
    a lower limit than the machine, the values are the group's, and ``limited`` is True.
    """

    total: int
    available: int
    limited: bool = False


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """Return the free memory of the machine or of this process's control group.

    ``root`` is the directory that contains ``proc`` and ``sys``. Raises OSError or ValueError if the kernel does not
    report the free memory.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    memory = FreeMemory(sizes["MemTotal"], sizes["MemAvailable"])
    limit = memory_limit(memory.total, root)
    left = [int(left) for left in limits("memory", _available_v2, _available_v1, root)]
    if limit:
        memory = replace(memory, total=limit, limited=True)
    if left and min(left) < memory.available:
        memory = replace(memory, available=max(0, min(left)), limited=True)
    return memory


def usable_memory(root: Path = Path("/")) -> int:
    """Return the maximum memory of this process (bytes): the machine's, or the limit of its control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_limit(total, root) or total


def memory_limit(total: int, root: Path = Path("/")) -> int:
    """Return the lowest control group limit of this process (bytes) below ``total``; 0 if there is none."""
    bounds = limits(
        "memory",
        lambda group: _number(group / "memory.max"),
        lambda group: _number(group / "memory.limit_in_bytes"),
        root,
    )
    return min((int(limit) for limit in bounds if limit < min(_UNLIMITED, total)), default=0)


def read_size(text: str, whole: int) -> int:
    """Parse a size in bytes: a number, a number with a unit (``8GiB``, ``500MB``), or a share of ``whole`` (``80%``).

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
    """Format a size (bytes) as ``412 MiB`` or ``13.5 GiB``."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 10 << 30 else f"{round(size / (1 << 20))} MiB"


def _available_v2(group: Path) -> float | None:
    """Return the limit minus the usage, which excludes reclaimable file cache."""
    return _available(group, "memory.max", "memory.current", ("active_file", "inactive_file"))


def _available_v1(group: Path) -> float | None:
    names = ("total_active_file", "total_inactive_file")
    return _available(group, "memory.limit_in_bytes", "memory.usage_in_bytes", names)


def _available(group: Path, limit_file: str, usage_file: str, cached: tuple[str, ...]) -> float | None:
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
    except (OSError, ValueError):  # "max" means no limit
        return None


_KIBIBYTE: Final = 1024


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the resident memory of a process including mapped files (bytes); 0 if unknown."""
    try:
        pages = (proc / str(pid) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def children_of(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the ids of a process's children; empty if unknown or if the process has ended."""
    children: list[int] = []
    try:
        threads = os.listdir(proc / str(pid) / "task")  # Path.glob raises if a folder disappears during iteration
    except OSError:
        return children
    for thread in threads:
        with suppress(OSError, ValueError):
            children += map(int, (proc / str(pid) / "task" / thread / "children").read_text().split())
    return children


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a group of processes (bytes).

    ``host`` is their proportional share (Pss): private pages, and a part of each page that other processes map too,
    such as a page of a library or a weight file. The sum over all processes is the memory that they really use.
    ``shared`` is the part of ``host`` in shared memory. ``gpus`` is keyed by the driver's GPU number.
    """

    host: int = 0
    shared: int = 0
    gpus: Mapping[int, int] = field(default_factory=dict)


class ProcessReader:
    """Reads the memory of processes and all their descendants.

    GPUs are read if ``nvidia-ml-py`` and a driver are installed. In a container with a driver that uses the host's
    process ids, the processes are not found and GPU memory is omitted.
    """

    def __init__(
        self, proc: Path = Path("/proc"), load_nvml: Callable[[], Any] = lambda: import_module("pynvml")
    ) -> None:
        self._proc = proc
        self._load_nvml = load_nvml

    def read(self, groups: Iterable[Iterable[int]]) -> list[ProcessMemory]:
        """Return the memory of each group of processes; ended processes count as zero."""
        on_gpus = self._on_gpus()
        memory = []
        for group in groups:
            host = shared = 0
            gpus: defaultdict[int, int] = defaultdict(int)
            for pid in {pid for root in group for pid in self._family(root)}:
                own_host, own_shared = self._host(pid)
                host += own_host
                shared += own_shared
                for gpu, used in on_gpus.get(pid, {}).items():
                    gpus[gpu] += used
            memory.append(ProcessMemory(host, shared, dict(gpus)))
        return memory

    def gpu_free(self) -> dict[int, int]:
        """Return the free memory of each GPU (bytes), by the driver's number; empty without NVML."""
        memory = {number: self._gpus.read("MemoryInfo", gpu) for number, gpu in enumerate(self._gpus.handles)}
        return {number: int(info.free) for number, info in memory.items() if info is not None}

    def _host(self, pid: int) -> tuple[int, int]:
        """Return Pss and its part in shared memory; the resident size and 0 if the kernel reports no Pss."""
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            return sizes["Pss"] * _KIBIBYTE, sizes.get("Pss_Shmem", 0) * _KIBIBYTE
        except (OSError, KeyError, ValueError, IndexError):
            return resident_bytes(pid, self._proc), 0

    def _family(self, pid: int) -> Iterator[int]:
        """Yield a process and its descendants; only the process if its children are unknown."""
        yield pid
        for child in children_of(pid, self._proc):
            yield from self._family(child)

    def _on_gpus(self) -> dict[int, dict[int, int]]:
        """Return the memory on each GPU, by process."""
        used: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for number, gpu in enumerate(self._gpus.handles):
            for process in self._gpus.read("ComputeRunningProcesses", gpu) or ():
                used[process.pid][number] = int(process.usedGpuMemory or 0)
        return used

    @cached_property
    def _gpus(self) -> Gpus:
        """The GPUs, which are listed once."""
        return Gpus(self._load_nvml)
