"""Control group limits of a process, versions 1 and 2.  Needs only the standard library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

#: Reads a limit from a group's folder; None if the group sets none.
Read = Callable[[Path], float | None]


def limits(controller: str, v2: Read, v1: Read, root: Path = Path("/"), process: int | str = "self") -> Iterator[float]:
    """Yield the limits of ``controller`` for the process: those of its group and of all parent groups.

    ``root`` is the folder with ``proc`` and ``sys``.  Yields nothing without control groups.
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
