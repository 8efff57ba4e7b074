"""Facts of the machine: processor, memory, limits of the process, ports."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from conch.backends.native.threads import usable_cores
from conch.doctor.facts import LimitsFact, MemoryFact, PortFact, ProcessorFact
from conch.frontends.ports import holder, is_free
from conch.telemetry.memory import memory_limit

#: What engines use, and the processor's flags that mean it (any of them).
FEATURES: Final[Mapping[str, frozenset[str]]] = {
    "AVX2": frozenset({"avx2"}),
    "AVX512": frozenset({"avx512f"}),
    "VNNI": frozenset({"avx512_vnni", "avx_vnni", "asimddp"}),
    "AMX": frozenset({"amx_int8", "amx_bf16"}),
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
}
#: The names of makers in /proc/cpuinfo.
_MAKERS: Final = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}


def processor(root: Path = Path("/")) -> ProcessorFact:
    """The processor; ``root`` is where ``proc`` and ``sys`` are mounted."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    flags = set((values.get("flags") or values.get("Features") or "").split())
    maker = values.get("vendor_id", "")
    return ProcessorFact(
        name=values.get("model name") or platform.machine(),
        maker=_MAKERS.get(maker, maker or "unknown"),
        cores=os.cpu_count() or 1,
        usable=usable_cores(root),
        features={name: bool(flags & meaning) for name, meaning in FEATURES.items()},
    )


def memory(root: Path = Path("/")) -> MemoryFact:
    """The machine's memory, and the least that a control group leaves of it."""
    seen = psutil.virtual_memory()
    try:
        shm = shutil.disk_usage(root / "dev/shm")
        shm_total, shm_free = shm.total, shm.free
    except OSError:
        shm_total = shm_free = 0
    return MemoryFact(
        total=seen.total,
        available=seen.available,
        limit=memory_limit(seen.total, root),
        shm_total=shm_total,
        shm_free=shm_free,
        memfd=hasattr(os, "memfd_create"),
    )


def process_limits() -> LimitsFact:
    """The limits that the server would start with."""
    return LimitsFact(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK))


def ports(services: Mapping[str, int], address: str) -> tuple[PortFact, ...]:
    """Whether each service's port is free, and else who listens there, as far as that may be known."""
    return tuple(
        PortFact(service, port, "" if is_free(address, port) else holder(port)) for service, port in services.items()
    )
