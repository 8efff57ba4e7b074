"""What a machine is: processor, cores, memory, and what limits its speed.  Read from the kernel's files."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from conch.backends.base.threads import cpu_quota, usable_cores


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """``cores`` are those that this process may use, ``all_cores`` the machine's; ``memory`` is all it has (bytes).

    ``governor`` chooses the clock rate, between the ``frequencies`` (Hz): empty where the system does not show them, as
    in most virtual machines.  ``quota`` is how many cores' time the control group may use (None: any), and
    ``virtual`` the name of the virtual machine or the container (empty: neither can be seen).
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
        """This machine; ``root`` is where ``proc`` and ``sys`` are mounted."""
        scaling = root / "sys/devices/system/cpu/cpu0/cpufreq"
        rates = (_text(scaling / f"scaling_{end}_freq") for end in ("min", "max"))
        return cls(
            processor(root / "proc/cpuinfo"), usable_cores(root), psutil.cpu_count() or 1,
            psutil.virtual_memory().total, _text(scaling / "scaling_governor"),
            tuple(int(rate) * 1000 for rate in rates if rate.isdigit()), cpu_quota(root), _virtual(root),
        )  # fmt: skip

    def __str__(self) -> str:
        """In a line, as ``Some CPU, 2 of 8 cores, 16 GiB, governor powersave``."""
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
    """The machine for a manifest: ``load_before`` is its load average before the conversion, and ``others`` the share
    of the cores that other processes used while variants were measured."""
    facts = asdict(MachineFacts.read())
    return facts | {
        # As JSON has it, so that what was read is what was written.
        "frequencies": list(facts["frequencies"]),
        "load_before": round(load_before, 2),
        "load_during": round(load_average(), 2),
        "others": round(others, 3),
    }


def load_average() -> float:
    """How many threads ran or waited to run, on average over the last minute."""
    return os.getloadavg()[0]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor by the name that it has for itself, else by its architecture."""
    lines = _text(cpuinfo).splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _virtual(root: Path) -> str:
    """The container's kind, else the maker of the virtual machine by its firmware, else that it is one."""
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
