"""Control groups of a process, versions 1 and 2: their limits, and the time for which they throttled it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

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


def seconds_throttled(process: int | str = "self", root: Path = Path("/")) -> float:
    """Return the throttled time of the control groups of ``process`` and their parents, over all processors (s).

    A group is throttled while its CPU quota is used up. The time counts from the creation of each group. Source:
    ``throttled_usec`` of ``cpu.stat`` (``throttled_time`` in version 1 of control groups); 0 if missing.
    """
    return sum(limits("cpu", _microseconds, _nanoseconds, root, process))


def _microseconds(group: Path) -> float | None:
    return _read(group, "throttled_usec", 1e-6)


def _nanoseconds(group: Path) -> float | None:
    return _read(group, "throttled_time", 1e-9)


def _read(group: Path, name: str, unit: float) -> float | None:
    try:
        lines = (group / "cpu.stat").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * unit for line in lines if line.startswith(f"{name} ")), None)
