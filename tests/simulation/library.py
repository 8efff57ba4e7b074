"""Threads that call a ``conch.Server``, whose application the simulation runs, or a ``conch.Client``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np

from conch.client.client import Client
from conch.core.errors import ConchError
from conch.core.inference import InferResponse
from conch.core.tensors import WireTensor
from conch.library.app import Application
from conch.library.server import Server
from tests.simulation.connection import OnResponse
from tests.simulation.loop import SimulatedLoop
from tests.simulation.threads import SimulatedFuture, SimulatedQueue, SimulatedThread

#: By how much a call may exceed its timeout (s), for the time that threads and the network take.
_SLACK_SECONDS = 0.5


class SimulatedLoopThread:
    """Runs calls on the simulation's event loop; replaces :class:`conch.library.loop_thread.LoopThread`."""

    is_current = False

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    @property
    def is_forked(self) -> bool:
        return self._loop.is_closed()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = SimulatedFuture()

        def begin() -> None:
            task = self._loop.create_task(coroutine, name="library")
            task.add_done_callback(lambda task: self._loop.later(0, partial(_finish, future, task)))

        self._loop.later(self._loop.latency(0.00005), partial(self._loop.call_soon, begin))
        self._loop.busy_threads -= 1
        try:
            return future.result()
        finally:
            self._loop.busy_threads += 1

    def close(self) -> None:
        """Do nothing: the simulation owns the loop."""


def _finish(future: SimulatedFuture, task: Any) -> None:
    error = task.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def running(application: Application) -> Any:
    """Return a fake for ``application`` that a ``conch.AsyncServer`` can start and stop without effect."""
    steps = dict.fromkeys(("listen", "load_models", "stop"), _nothing)
    return SimpleNamespace(server=application.server, addresses={}, abandon=lambda: None, **steps)


async def _nothing(*ignored: object) -> None:
    """Do nothing: the simulation starts and stops the application."""


class LibraryCaller:
    """A thread that makes calls of ``service`` in order. ``broken`` is called if one exceeds its timeout."""

    def __init__(self, loop: SimulatedLoop, service: Server | Client, broken: Callable[[str], None]) -> None:
        #: Whether something other than the server may have closed its connections.
        self.disturbed = False
        self._loop = loop
        self._service = service
        self._broken = broken
        self._calls = SimulatedQueue(loop)
        SimulatedThread(loop, self._run).start()

    def infer(self, arguments: dict[str, Any], id: str, shape: tuple[int, ...], on_response: OnResponse) -> None:
        """Send a request when the previous one has ended."""
        self._calls.put((None, partial(self._infer, arguments, id, shape, on_response)))

    def close(self) -> None:
        """Make no further calls."""
        self._calls.put((None, None))

    def _run(self) -> None:
        with self._service:
            while (call := self._calls.get()[1]) is not None:
                call()

    def _infer(self, arguments: dict[str, Any], id: str, shape: tuple[int, ...], on_response: OnResponse) -> None:
        values = np.array([arguments[name] for name in ("value", "milliseconds", "count")], np.int64).reshape(shape)
        timeout = arguments.get("deadline", 0) / 1000 or None
        options: dict[str, Any] = {"request_id": id, "timeout": timeout}
        if "correlation" in arguments:
            options |= {f"sequence_{name}": arguments[name] for name in ("start", "end")}
            options["sequence_id"] = arguments["correlation"]
        begun = self._loop.clock.now_ns
        try:
            if arguments.get("streamed"):
                stream = partial(self._service.infer_stream, arguments["model"], {"IN": values}, **options)
                for result in islice(stream(), arguments.get("results")):
                    on_response(InferResponse(list(_tensors(result)), final=False))
                on_response(InferResponse())
            else:
                result = self._service.infer(arguments["model"], {"IN": values}, **options)
                on_response(InferResponse(list(_tensors(result))))
        except ConchError as error:
            on_response(InferResponse(error=error))
        took = (self._loop.clock.now_ns - begun) / 1e9
        if timeout is not None and took > timeout + _SLACK_SECONDS and not self._loop.slowness:
            self._broken(f"a call of {type(self._service).__name__} took {took:.1f} s with timeout={timeout:g}")


def _tensors(result: Any) -> Iterator[WireTensor]:
    for name in result.outputs:
        array = np.asarray(result[name])
        yield WireTensor(name, "INT64", array.shape, array.astype("<i8").tobytes())
