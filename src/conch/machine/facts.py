"""The properties of a machine: processor, cores, memory and limits of its speed, read from the kernel's files."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from conch.machine.cores import cpu_quota, usable_cores


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
