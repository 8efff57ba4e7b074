"""The cores that this process may use, their division among instances, and their instruction sets."""

from __future__ import annotations

import os
from pathlib import Path

from conch.machine.cgroups import limits


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


def divided(threads: int, instances: int) -> int:
    """Return the size of each instance's own thread pool if ``instances`` share ``threads``."""
    return max(1, threads // max(1, instances))


def pooled(threads: int, instances: int) -> int:
    """Return the size of one pool that all instances share and whose callers compute too.

    The ``instances`` callers and the pool's ``size - 1`` own threads add up to ``threads``.
    """
    return max(1, threads - max(1, instances) + 1)


def openmp(cores: int, instances: int) -> dict[str, str]:
    """Return the environment variable that limits OpenMP to an instance's share of ``cores``.

    Must be set before a library that uses OpenMP is imported. An existing value in the environment takes precedence.
    """
    name = "OMP_NUM_THREADS"
    return {name: os.environ.get(name) or str(divided(cores, instances))}


def _v2(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no limit
        return None


def _v1(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
