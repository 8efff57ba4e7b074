"""Replaces the server's access to the machine by the simulation."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from conch.client import connection as client_connection
from conch.frontends.budget import ByteBudget
from conch.library import app, async_server
from conch.library import server as library_server
from conch.machine import guarded_server
from conch.machine.memory import ProcessMemory
from conch.repository.stores import copies, filesystem, pool
from conch.repository.stores import copies as transfer
from conch.server import core
from conch.server.execution.remote import grpc_calls
from conch.telemetry.metrics import Registry
from conch.workers.host import processes, spawn, templates
from conch.workers.host import spawn as output
from conch.workers.host.process import WorkerProcess
from tests.simulation.library import SimulatedLoopThread, running
from tests.simulation.remotes import channels_to
from tests.simulation.threads import SimulatedFuture, SimulatedQueue, Threading, wait_for

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class InjectedError(OSError):
    """An error injected by the simulation; the server may log it."""


class SimulatedMemory:
    """Reports the memory of processes; the next ``failures`` readings fail."""

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
def substituted(simulation: Simulation) -> Iterator[None]:
    """Give the server of ``simulation`` simulated workers, and a machine with nothing else, during the block."""
    loop = simulation.loop
    make_budget = ByteBudget.of

    def new_budget(setting: int) -> ByteBudget:
        simulation.budgets.append(make_budget(setting))
        return simulation.budgets[-1]

    def new_registry(*arguments: Any, **options: Any) -> Registry:
        simulation.registry = Registry(*arguments, **options)
        return simulation.registry

    threads = Threading(loop)
    platforms = {
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": simulation.program.settings.get("oci_default_model", ""),
        "AIP_HEALTH_ROUTE": "/health",
        "AIP_PREDICT_ROUTE": "/predict",
    }
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, platforms))
        for module in (pool, copies, transfer):
            patches.enter_context(mock.patch.object(module, "threading", threads))
        for module, name, value in (
            (pool, "SimpleQueue", partial(SimulatedQueue, loop)),
            (pool, "Future", SimulatedFuture),
            (transfer, "wait", wait_for),
            (filesystem, "open_s3", lambda url, environment: simulation.store),
            (core, "MemoryLedger", partial(core.MemoryLedger, reader=simulation.memory)),
            (core, "visible_gpus", lambda: ()),
            (grpc_calls, "RemoteGrpc", channels_to(simulation.remotes)),
            (ByteBudget, "of", new_budget),
            (async_server, "Application", lambda settings: running(simulation.application)),
            (library_server, "LoopThread", partial(SimulatedLoopThread, loop)),
            (client_connection, "getaddrinfo", simulation.sockets.getaddrinfo),
            (client_connection, "create_connection", simulation.sockets.create_connection),
            (client_connection, "select", simulation.sockets),
            (app, "Registry", new_registry),
            (app, "heap_trimmer", lambda: None),
            (app, "remove_orphans", lambda: []),
            *_processes(simulation),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def _processes(simulation: Simulation) -> list[tuple[Any, str, Any]]:
    """Replace the code that starts workers: by simulated workers, or by conch's own code on a simulated kernel."""
    workers, kernel = simulation.workers, simulation.kernel
    if kernel is None:

        def new_process(name: str, spawn: Any = None) -> WorkerProcess:
            return WorkerProcess(name, workers.spawn)

        return [(core, "WorkerProcesses", partial(core.WorkerProcesses, new_process))]
    return [
        *((module, "os", kernel.os) for module in (spawn, templates, output, processes)),
        *((module, "socket", kernel.socket) for module in (spawn, templates)),
        *((module, "signal", kernel.signal) for module in (spawn, templates)),
        *((module, "subprocess", kernel.subprocess) for module in (spawn, guarded_server)),
        (templates, "adopting", nullcontext),
    ]
