"""The time for which the kernel stopped processes because the CPU quota of their control group was used up."""

from __future__ import annotations

from pathlib import Path

from conch.machine.cgroups import limits


def seconds_throttled(process: int | str = "self", root: Path = Path("/")) -> float:
    """Return the throttled time of the control groups of ``process`` and their parents, over all processors (s).

    The time counts from the creation of each group. Source: ``throttled_usec`` of ``cpu.stat`` (``throttled_time`` in
    version 1 of control groups); 0 if missing.
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
