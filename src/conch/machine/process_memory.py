"""Memory of processes on the host and on NVIDIA GPUs.

Reads ``/proc`` and queries the driver; reads no disk. ``resident_bytes`` takes microseconds. A ``ProcessReader``
makes the kernel walk all pages of a process, which takes milliseconds per gigabyte, so the server calls it in a thread.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

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
        self._nvml: Any = None
        self._gpus: list[Any] | None = None

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
        free = {}
        for number, gpu in enumerate(self._handles()):
            try:
                free[number] = int(self._nvml.nvmlDeviceGetMemoryInfo(gpu).free)
            except self._nvml.NVMLError:
                continue
        return free

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
        for number, gpu in enumerate(self._handles()):
            try:
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            except self._nvml.NVMLError:
                continue
            for process in running:
                used[process.pid][number] = int(process.usedGpuMemory or 0)
        return used

    def _handles(self) -> list[Any]:
        """Return the GPUs, which are listed once; empty without the package or the driver."""
        if self._gpus is None:
            self._gpus = []
            try:
                self._nvml = nvml = self._load_nvml()
                nvml.nvmlInit()
                self._gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            except Exception:  # ImportError, or any error of pynvml for a missing driver
                self._gpus = []
        return self._gpus
