"""The memory that this process may use: of the machine, or of its control group; and sizes of memory as text."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from conch.machine.cgroups import limits

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
    left = [int(left) for left in limits("memory", _left_v2, _left_v1, root)]
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
    bounds = limits("memory", lambda group: _number(group / "memory.max"), _limit_v1, root)
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


def _limit_v1(group: Path) -> float | None:
    return _number(group / "memory.limit_in_bytes")


def _left_v2(group: Path) -> float | None:
    """Return the limit minus the usage, which excludes reclaimable file cache."""
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
    except (OSError, ValueError):  # "max" means no limit
        return None
