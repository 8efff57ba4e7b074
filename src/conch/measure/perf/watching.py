"""Reads the load of this machine and of the server's processes between windows, in the measuring process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Final

from conch.machine.cgroups import seconds_throttled
from conch.machine.facts import MachineFacts, load_average
from conch.machine.interference import CpuClocks, Interference, InterferenceMeter
from conch.machine.process_memory import ProcessReader
from conch.machine.processes import ProcessTimes
from conch.measure.perf.measured import MachineFigures
from conch.measure.perf.server.processes import ServerProcesses
from conch.measure.perf.server.resources import ResourceFigures

#: Maximum age of the server's memory figure (s).
_MEMORY_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class WindowReading:
    """The state of the machine during a window: interference, and the server's average cores and memory (bytes)."""

    interference: Interference
    cores: float = 0.0
    memory: int = 0


class MachineWatch:
    """Watches the machine and the server; neither the senders nor the server count as interference."""

    def __init__(self, server: ServerProcesses) -> None:
        own = os.getpid()
        # A server in this process, as in tests, cannot be distinguished from the senders.
        self._server = () if own in server.pids else server.pids
        self.unseen = server.unseen
        self._facts = MachineFacts.read()
        self._load_before = load_average()
        self._begun = monotonic()
        # The server's group comes first, because the measuring process may have started the server.
        self._times = ProcessTimes([self._server, (own,)])
        self._reader = ProcessReader(load_nvml=_no_nvml)
        #: Time of the last reading of the server's memory (s, monotonic), and the memory (bytes).
        self._memory = (-_MEMORY_SECONDS, 0)
        self._used = (monotonic(), 0.0)
        self._meter = InterferenceMeter(self._clocks)

    def since_last(self) -> WindowReading:
        """Return the reading since the last call."""
        before = self._used
        interference = self._meter.since_last()
        if self.unseen:
            interference = replace(interference, others=0.0)
        wall = self._used[0] - before[0]
        cores = (self._used[1] - before[1]) / wall if wall > 0 else 0.0
        return WindowReading(interference, cores, self._resident())

    def machine(self, sights: Sequence[WindowReading]) -> MachineFigures:
        """Return the figures of the machine over the windows of ``sights``."""
        return MachineFigures(
            self._facts, self._load_before, load_average(), _mean(sight.interference for sight in sights),
            () if self.unseen else self._times.rivals(monotonic() - self._begun), self.unseen,
        )  # fmt: skip

    def resources(self, sights: Sequence[WindowReading]) -> ResourceFigures | None:
        """Return the server's resources over the windows of ``sights``; None if its processes were not found."""
        if not self._server or not sights:
            return None
        return ResourceFigures(fmean(sight.cores for sight in sights), max(sight.memory for sight in sights))

    def _resident(self) -> int:
        """Return the server's memory, read at intervals because the kernel scans all its pages for each reading."""
        now = monotonic()
        if now - self._memory[0] >= _MEMORY_SECONDS:
            [memory] = self._reader.read([self._server])
            self._memory = (now, memory.host)
        return self._memory[1]

    def _clocks(self) -> CpuClocks:
        server, own = self._times.read()
        self._used = (monotonic(), server)
        return replace(CpuClocks.read(server + own), throttled=_throttled(self._server))


def _throttled(pids: Iterable[int]) -> float:
    """Return for how long the control groups of this process and of ``pids`` were throttled (s), each group once."""
    groups: dict[str, int] = {}
    for process in (os.getpid(), *pids):
        with suppress(OSError):
            groups.setdefault((Path("/proc") / str(process) / "cgroup").read_text(), process)
    return sum(seconds_throttled(process) for process in groups.values())


def _mean(all_of: Iterable[Interference]) -> Interference:
    readings = list(all_of)
    if not readings:
        return Interference()
    return Interference(
        fmean(reading.others for reading in readings),
        fmean(reading.stolen for reading in readings),
        fmean(reading.throttled for reading in readings),
    )


def _no_nvml() -> Any:
    """Disable NVML here: :class:`~conch.measure.perf.server.gpus.GpuSampler` reads the GPUs."""
    raise ImportError
