"""How much memory processes have, of the machine and of NVIDIA GPUs.

Reads the kernel's files and asks the driver; no disk is touched.  ``resident_bytes`` takes microseconds; a
``ProcessReader`` makes the kernel walk through all pages of a process, milliseconds for each gigabyte, so the server
calls it in a thread.
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
    """The bytes of a process that are in memory, of mapped files too; 0 where the system does not tell."""
    try:
        pages = (proc / str(pid) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def children_of(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """The ids of a process's children; none where the kernel does not tell, or the process has ended meanwhile."""
    children: list[int] = []
    try:
        threads = os.listdir(proc / str(pid) / "task")  # Path.glob raises where a folder goes away under it
    except OSError:
        return children
    for thread in threads:
        with suppress(OSError, ValueError):
            children += map(int, (proc / str(pid) / "task" / thread / "children").read_text().split())
    return children


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What some processes have together (bytes).

    ``host`` is their proportional share (Pss): pages that nobody else has mapped, and of each page that others have
    mapped as well, such as a library's or a weights file's, its part; so the sum over all processes is what they really
    take.  ``shared`` is the part of ``host`` that lies in shared memory.  ``gpus`` is by the driver's number of a GPU.
    """

    host: int = 0
    shared: int = 0
    gpus: Mapping[int, int] = field(default_factory=dict)


class ProcessReader:
    """Reads processes and all that they have started.

    GPUs are read where ``nvidia-ml-py`` is installed and a driver is there; in a container whose driver numbers
    processes as the host does, their processes are not found and GPUs are left out.
    """

    def __init__(
        self, proc: Path = Path("/proc"), load_nvml: Callable[[], Any] = lambda: import_module("pynvml")
    ) -> None:
        self._proc = proc
        self._load_nvml = load_nvml
        self._nvml: Any = None
        self._gpus: list[Any] | None = None

    def read(self, groups: Iterable[Iterable[int]]) -> list[ProcessMemory]:
        """What each group of processes has; nothing for those that have ended."""
        on_gpus = self._on_gpus()
        found = []
        for group in groups:
            host = shared = 0
            gpus: defaultdict[int, int] = defaultdict(int)
            for pid in {one for root in group for one in self._family(root)}:
                own_host, own_shared = self._host(pid)
                host += own_host
                shared += own_shared
                for gpu, used in on_gpus.get(pid, {}).items():
                    gpus[gpu] += used
            found.append(ProcessMemory(host, shared, dict(gpus)))
        return found

    def gpu_free(self) -> dict[int, int]:
        """The bytes that each GPU has left, by the driver's number; empty without NVML."""
        free = {}
        for number, gpu in enumerate(self._handles()):
            try:
                free[number] = int(self._nvml.nvmlDeviceGetMemoryInfo(gpu).free)
            except self._nvml.NVMLError:
                continue
        return free

    def _host(self, pid: int) -> tuple[int, int]:
        """The proportional share and its part in shared memory; the resident size where the kernel has no shares."""
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            return sizes["Pss"] * _KIBIBYTE, sizes.get("Pss_Shmem", 0) * _KIBIBYTE
        except (OSError, KeyError, ValueError, IndexError):
            return resident_bytes(pid, self._proc), 0

    def _family(self, pid: int) -> Iterator[int]:
        """A process and its descendants; the process alone where the kernel does not tell its children."""
        yield pid
        for child in children_of(pid, self._proc):
            yield from self._family(child)

    def _on_gpus(self) -> dict[int, dict[int, int]]:
        """By process, what it has on each GPU."""
        found: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for number, gpu in enumerate(self._handles()):
            try:
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            except self._nvml.NVMLError:
                continue
            for process in running:
                found[process.pid][number] = int(process.usedGpuMemory or 0)
        return found

    def _handles(self) -> list[Any]:
        """The GPUs, found once; none without the package or the driver."""
        if self._gpus is None:
            self._gpus = []
            try:
                self._nvml = nvml = self._load_nvml()
                nvml.nvmlInit()
                self._gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            except Exception:  # ImportError, or whatever pynvml says of a missing driver
                self._gpus = []
        return self._gpus
