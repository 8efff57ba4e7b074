"""How often the kernel stopped a process because its control group had used up its share of processor time."""

from __future__ import annotations

from pathlib import Path

from conch.telemetry.cgroups import limits


def times_throttled(process: int | str = "self", root: Path = Path("/")) -> int:
    """The periods in which the groups of ``process`` and those above were stopped, since they were made.

    Source: ``nr_throttled`` of ``cpu.stat``, in both versions of control groups; 0 without them.
    """
    return int(sum(limits("cpu", _throttled, _throttled, root, process)))


def _throttled(group: Path) -> float | None:
    try:
        lines = (group / "cpu.stat").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) for line in lines if line.startswith("nr_throttled ")), None)
