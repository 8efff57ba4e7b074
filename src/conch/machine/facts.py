"""The properties of a machine: processor, cores, GPUs, memory and limits of its speed.

Includes the cores that this process may use, their division among instances, and their instruction sets.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from conch.machine.memory import limits


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that the process may use: its CPU affinity, limited by its cgroup quota; at least 1.

    ``root`` is the directory of ``proc`` and ``sys``. Sources: ``sched_getaffinity``; ``cpu.max`` of cgroup v2,
    ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` of v1, in the process's cgroup and its ancestors.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on this system
        cores = os.cpu_count() or 1
    quota = cpu_quota(root)
    # A fraction of a core is not used: with one thread more than the quota covers, the kernel throttles all threads.
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of the process's cgroups (cores); None if there is no limit."""
    return min(limits("cpu", _v2, _v1, root), default=None)


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets of the CPU, by Linux's names; empty if unknown."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(flags, "").split())


def threads_per_instance(threads: int, instances: int) -> int:
    """Return the size of each instance's own thread pool if ``instances`` share ``threads``."""
    return max(1, threads // max(1, instances))


def shared_pool_threads(threads: int, instances: int) -> int:
    """Return the size of one pool that all instances share and whose callers compute too.

    The ``instances`` callers and the pool's ``size - 1`` own threads add up to ``threads``.
    """
    return max(1, threads - max(1, instances) + 1)


_OPENMP: Final = "OMP_NUM_THREADS"


def openmp_threads(cores: int, instances: int) -> int:
    """Return the size of an instance's pool of OpenMP: ``OMP_NUM_THREADS``, or its share of ``cores``."""
    value = os.environ.get(_OPENMP, "").partition(",")[0].strip()  # after a comma: the sizes of nested pools
    return int(value) if value.isdecimal() and int(value) else threads_per_instance(cores, instances)


def openmp(cores: int, instances: int) -> dict[str, str]:
    """Return the environment variable that limits OpenMP to an instance's share of ``cores``.

    Must be set before a library that uses OpenMP is imported. An existing value in the environment takes precedence.
    """
    return {_OPENMP: os.environ.get(_OPENMP) or str(threads_per_instance(cores, instances))}


def _v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" means no limit
        return None


def _v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None


_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[int, ...]:
    """Return the numbers of the GPUs, from 0, as CUDA numbers the devices in ``CUDA_VISIBLE_DEVICES``."""
    try:
        present = len(list(driver.iterdir()))
    except OSError:
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(range(present))
    return tuple(range(len(_names(visible))))


def environment_for(gpu: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process that sees only the GPU with number ``gpu``."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = _names(visible) if visible is not None else []
    return {**environment, "CUDA_VISIBLE_DEVICES": names[gpu] if gpu < len(names) else str(gpu)}


def _names(visible: str) -> list[str]:
    """Return the devices that CUDA takes from the variable, up to the first empty or negative one."""
    names = []
    for name in visible.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        names.append(name.strip())
    return names


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The properties of a machine.

    ``cores`` is the number of cores that this process may use, and ``all_cores`` the number that the machine has;
    ``memory`` is the total memory (bytes). ``governor`` is the CPU frequency governor, and ``frequencies`` its minimum
    and maximum (Hz); both are empty if the system does not report them, as in most virtual machines. ``quota`` is the
    CPU quota of the control group (cores, None: no limit). ``virtual`` describes the virtual machine or container
    (empty: none detected).
    """

    processor: str
    cores: int
    all_cores: int
    memory: int
    governor: str = ""
    frequencies: tuple[int, ...] = ()
    quota: float | None = None
    virtual: str = ""

    @classmethod
    def read(cls, root: Path = Path("/")) -> MachineFacts:
        """Read the properties of this machine; ``root`` is the directory in which ``proc`` and ``sys`` are mounted."""
        scaling = root / "sys/devices/system/cpu/cpu0/cpufreq"
        rates = (_text(scaling / f"scaling_{end}_freq") for end in ("min", "max"))
        return cls(
            processor(root / "proc/cpuinfo"), usable_cores(root), psutil.cpu_count() or 1,
            psutil.virtual_memory().total, _text(scaling / "scaling_governor"),
            tuple(int(rate) * 1000 for rate in rates if rate.isdigit()), cpu_quota(root), _virtual(root),
        )  # fmt: skip

    def __str__(self) -> str:
        """Return one line, such as ``Some CPU, 2 of 8 cores, 16 GiB, governor powersave``."""
        cores = f"{self.cores} cores" if self.cores == self.all_cores else f"{self.cores} of {self.all_cores} cores"
        parts = [self.processor, cores, f"{self.memory / 2**30:.0f} GiB"]
        if self.quota is not None:
            parts.append(f"a quota of {self.quota:g} cores")
        if self.governor:
            parts.append(f"governor {self.governor}")
        if len(self.frequencies) == 2:
            parts.append("{:.1f} to {:.1f} GHz".format(*(rate / 1e9 for rate in self.frequencies)))
        return ", ".join([*parts, *([self.virtual] if self.virtual else [])])


def description(load_before: float, others: float) -> Mapping[str, Any]:
    """Return the machine's properties for a manifest.

    ``load_before`` is the load average before the conversion, and ``others`` the fraction of the cores that other
    processes used while variants were measured.
    """
    facts = asdict(MachineFacts.read())
    return facts | {
        # A list, as in JSON, so that the result equals a manifest that was written and read.
        "frequencies": list(facts["frequencies"]),
        "load_before": round(load_before, 2),
        "load_during": round(load_average(), 2),
        "others": round(others, 3),
    }


def load_average() -> float:
    """Return the average number of running or runnable threads over the last minute."""
    return os.getloadavg()[0]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor, or its architecture if it has none."""
    lines = _text(cpuinfo).splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _virtual(root: Path) -> str:
    """Return the kind of container, or of virtual machine with its firmware's vendor; empty if neither is found."""
    if (root / ".dockerenv").exists():
        return "in a Docker container"
    if (root / "run/.containerenv").exists():
        return "in a container"
    if "hypervisor" not in _text(root / "proc/cpuinfo"):
        return ""
    maker = _text(root / "sys/class/dmi/id/sys_vendor")
    return f"a virtual machine ({maker})" if maker else "a virtual machine"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
