"""How many cores this process may use, and how instances share them."""

from __future__ import annotations

import os
from pathlib import Path

from conch.telemetry.cgroups import limits


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that the process may run on, or as many as its control group's quota pays for; at least 1.

    ``root`` is where ``proc`` and ``sys`` are mounted.  Sources: ``sched_getaffinity``; ``cpu.max`` of
    cgroup v2, ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` of v1, of the process's group and those above it.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on this system
        cores = os.cpu_count() or 1
    quota = cpu_quota(root)
    # A part of a core is left alone: one thread more than the quota pays for has all of them stopped.
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many cores' time the process's control groups allow; None for any."""
    return min(limits("cpu", _v2, _v1, root), default=None)


def divided(threads: int, instances: int) -> int:
    """The size of each instance's own pool when ``instances`` share ``threads``."""
    return max(1, threads // max(1, instances))


def pooled(threads: int, instances: int) -> int:
    """The size of one pool that all instances use, whose callers compute too.

    ``instances`` callers and the pool's ``size - 1`` threads of its own make ``threads`` together.
    """
    return max(1, threads - max(1, instances) + 1)


def openmp(cores: int, instances: int) -> dict[str, str]:
    """The variable that gives code which uses OpenMP a share of ``cores``, as long as nothing has imported it.

    What the environment says already counts.
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
