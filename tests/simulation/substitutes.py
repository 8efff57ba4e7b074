"""Puts the simulation in the place of what the server would ask of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from conch import app
from conch.repository.stores import copies, pool, s3, transfer
from conch.server import core
from conch.telemetry.processes import ProcessMemory
from conch.workers.host.process import WorkerProcess
from tests.simulation.stores import SimulatedStore
from tests.simulation.threads import SimulatedFuture, SimulatedQueue, Threading, wait_for
from tests.simulation.workers import SimulatedWorkers


class InjectedError(OSError):
    """What the simulation has the machine do; it may be logged."""


class SimulatedMemory:
    """Tells the memory of processes; ``failures`` says how many of the next readings fail."""

    def __init__(self) -> None:
        self.failures = 0

    def read(self, groups: Iterable[Iterable[int]]) -> list[ProcessMemory]:
        if self.failures:
            self.failures -= 1
            raise InjectedError("too many open files")
        return [ProcessMemory(len(list(group)) << 20, 0, {}) for group in groups]

    def gpu_free(self) -> dict[int, int]:
        return {}


@contextmanager
def substituted(workers: SimulatedWorkers, memory: SimulatedMemory, store: SimulatedStore) -> Iterator[None]:
    """As long as the block runs, servers have simulated workers, and a machine without anything else."""

    def new_process(name: str, spawn: Any = None) -> WorkerProcess:
        return WorkerProcess(name, workers.spawn)

    threads = Threading(workers.surroundings.loop)
    with ExitStack() as patches:
        for module in (pool, copies, transfer):
            patches.enter_context(mock.patch.object(module, "threading", threads))
        for module, name, value in (
            (pool, "SimpleQueue", partial(SimulatedQueue, workers.surroundings.loop)),
            (pool, "Future", SimulatedFuture),
            (transfer, "wait", wait_for),
            (s3, "open_s3", lambda url, environment: store),
            (core, "WorkerProcesses", partial(core.WorkerProcesses, new_process)),
            (core, "MemoryLedger", partial(core.MemoryLedger, reader=memory)),
            (core, "visible_gpus", lambda: ()),
            (app, "heap_trimmer", lambda: None),
            (app, "remove_orphans", lambda: []),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield
