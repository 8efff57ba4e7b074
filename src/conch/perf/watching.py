"""Looks at this machine and at the server's processes between windows, in the process that measures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Final

from conch.machine.facts import MachineFacts, load_average
from conch.machine.interference import CpuClocks, Interference, InterferenceMeter
from conch.machine.processes import ProcessTimes
from conch.machine.throttling import seconds_throttled
from conch.perf.measured import MachineFigures
from conch.perf.server.processes import ServerProcesses
from conch.perf.server.resources import ResourceFigures
from conch.telemetry.processes import ProcessReader

#: How old what is known of the server's memory may be (s).
_MEMORY_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class WindowReading:
    """What was seen of a window: what others took, the cores that the server used on average, its memory (bytes)."""

    interference: Interference
    cores: float = 0.0
    memory: int = 0


class MachineWatch:
    """The machine and the server from now on; neither the senders nor the server are others."""

    def __init__(self, server: ServerProcesses) -> None:
        own = os.getpid()
        # A server in this very process, as in tests, cannot be told from what measures it.
        self._server = () if own in server.pids else server.pids
        self.unseen = server.unseen
        self._facts = MachineFacts.read()
        self._load_before = load_average()
        self._begun = monotonic()
        # The server's group comes first: whoever measures may have started it.
        self._times = ProcessTimes([self._server, (own,)])
        self._reader = ProcessReader(load_nvml=_no_nvml)
        #: When the server's memory was read last (s, monotonic), and what it was (bytes).
        self._memory = (-_MEMORY_SECONDS, 0)
        self._used = (monotonic(), 0.0)
        self._meter = InterferenceMeter(self._clocks)

    def since_last(self) -> WindowReading:
        """What happened since the call before."""
        before = self._used
        interference = self._meter.since_last()
        if self.unseen:
            interference = replace(interference, others=0.0)
        wall = self._used[0] - before[0]
        cores = (self._used[1] - before[1]) / wall if wall > 0 else 0.0
        return WindowReading(interference, cores, self._resident())

    def machine(self, sights: Sequence[WindowReading]) -> MachineFigures:
        """The machine during the windows of ``sights``."""
        return MachineFigures(
            self._facts, self._load_before, load_average(), _mean(sight.interference for sight in sights),
            () if self.unseen else self._times.rivals(monotonic() - self._begun), self.unseen,
        )  # fmt: skip

    def resources(self, sights: Sequence[WindowReading]) -> ResourceFigures | None:
        """What the server used in the windows of ``sights``; None where it was not seen."""
        if not self._server or not sights:
            return None
        return ResourceFigures(fmean(sight.cores for sight in sights), max(sight.memory for sight in sights))

    def _resident(self) -> int:
        """The server's memory, read now and then: the kernel walks through all its pages for that."""
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
    """For how long the groups of this process and of ``pids`` were stopped (s), each group once."""
    groups: dict[str, int] = {}
    for process in (os.getpid(), *pids):
        with suppress(OSError):
            groups.setdefault((Path("/proc") / str(process) / "cgroup").read_text(), process)
    return sum(seconds_throttled(process) for process in groups.values())


def _mean(all_of: Iterable[Interference]) -> Interference:
    found = list(all_of)
    if not found:
        return Interference()
    return Interference(
        fmean(one.others for one in found), fmean(one.stolen for one in found), fmean(one.throttled for one in found)
    )


def _no_nvml() -> Any:
    """GPUs are looked at by a sampler of their own."""
    raise ImportError
