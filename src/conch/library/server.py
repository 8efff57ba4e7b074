"""An in-process server for threads, ``AsyncServer`` on its own event loop; and ``conch serve`` as a function."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from conch.client.deadline import Deadline
from conch.client.requests import OutgoingRequest
from conch.client.results import InferResult
from conch.client.service import InferenceService, RequestTarget, ResultStream
from conch.core.errors import ConchError, unavailable, unsupported
from conch.core.inference import ModelSignature
from conch.library import app, inprocess
from conch.library.announcing import announcer
from conch.library.async_server import AsyncServer
from conch.library.flags import plan
from conch.library.inprocess import HeldModel, LocalStream
from conch.library.loop_thread import LoopThread

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncServer, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method of ``AsyncServer`` as one of ``Server``, which runs it on the server's event loop."""

    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        result: T = self._run(method(self._server, *arguments, **options))
        return result

    return call


class Server(InferenceService):
    """Serves models inside the process: ``with conch.Server(model_repository="models") as server``.

    ``model`` is a single model in place of a repository, as for ``conch serve MODEL``: an ID on the Hub, the directory
    of a checkpoint, or a model file. ``flags`` are the options of ``conch serve`` with underscores, including those for
    a single model. Models run in worker processes; the server runs in a thread.

    No port is opened unless ``http_port``, ``grpc_port``, ``metrics_port`` or ``openai_port`` is given (0 for any free
    port), or ``ports=True``, which opens the ports of ``conch serve``; ``urls`` has their addresses. Log messages go
    through ``logging`` only, unless a ``log_…`` option is given.

    Any thread may call. The constructor raises INVALID_ARG for invalid options.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        /,
        *,
        model_repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        ports: bool = False,
        **flags: Any,
    ) -> None:
        self._server = AsyncServer(model, model_repository=model_repository, ports=ports, **flags)
        self._thread: LoopThread | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def start(self) -> Self:
        """Start; returns this server when its models are loaded.

        If it cannot start, closes everything and raises the cause. A server can be started only once.
        """
        if self._thread is not None:
            raise unavailable("a server can be started only once: create another one")
        thread = self._thread = LoopThread()
        try:
            thread.run(self._server.start())
        except BaseException:
            thread.close()
            raise
        self._finalizer = weakref.finalize(self, _close_unclosed, self._server, thread, repr(self))
        return self

    def close(self, seconds: float | None = None) -> None:
        """Complete the in-flight requests, stop the workers and close the ports.

        Requests that take longer than ``seconds`` fail; the default is the option ``exit_timeout_secs``.
        """
        if self._finalizer is not None and self._finalizer.detach() is not None:
            thread = self._thread_that_runs
            if not thread.is_forked:  # a fork leaves its parent's server running
                _close(self._server, thread, seconds)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def model_name(self) -> str:
        """The name of the single model that this server serves; empty if it serves a repository."""
        return self._server.model_name

    @property
    def urls(self) -> dict[str, str]:
        """The URLs of the open ports: ``http``, ``grpc``, ``metrics`` and ``openai``."""
        return self._server.urls

    def in_flight(self, models: Collection[str] = ()) -> int:
        """Return the number of in-flight requests of ``models``, or of all models.

        A request to an ensemble counts in addition to those of its steps.
        """
        return self._run(_in_flight(self._server, models))

    def live(self, *, timeout: float | None = None) -> bool:
        return self._open and self._run(self._server.live(timeout=timeout))

    def ready(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> bool:
        return self._open and self._run(self._server.ready(model, version, timeout=timeout))

    metadata = _blocking(AsyncServer.metadata)
    config = _blocking(AsyncServer.config)
    labels = _blocking(AsyncServer.labels)
    statistics = _blocking(AsyncServer.statistics)
    models = _blocking(AsyncServer.models)
    load = _blocking(AsyncServer.load)
    unload = _blocking(AsyncServer.unload)

    @contextlib.contextmanager
    def _target(self, model: str, version: int, deadline: Deadline) -> Iterator[RequestTarget]:
        held = self._run(self._server._hold_model(model, version, deadline))
        try:
            yield _LocalModel(self._thread_that_runs, held)
        finally:
            if not held.released:
                with contextlib.suppress(ConchError):  # the server is closed
                    self._run(_release(held))

    @property
    def _open(self) -> bool:
        return self._finalizer is not None and self._finalizer.alive

    @property
    def _thread_that_runs(self) -> LoopThread:
        if self._thread is None:
            raise unavailable("the server is not started: use it as a context manager, or call start()")
        return self._thread

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            thread = self._thread_that_runs
        except BaseException:
            coroutine.close()
            raise
        return thread.run(coroutine)


class _LocalModel:
    """A model of the server for a request from another thread; held until the request is submitted."""

    def __init__(self, thread: LoopThread, held: HeldModel) -> None:
        self._thread = thread
        self._hold_model = held
        self.signature: ModelSignature = held.model.signature

    def infer(self, request: OutgoingRequest) -> InferResult:
        return self._thread.run(_infer(self._hold_model, request))

    def stream(self, request: OutgoingRequest) -> ResultStream:
        return _BlockingStream(self._thread, self._thread.run(_stream(self._hold_model, request)))


class _BlockingStream(ResultStream):
    """The responses of a stream on the server's loop, read from another thread."""

    def __init__(self, thread: LoopThread, stream: LocalStream) -> None:
        self._thread = thread
        self._stream = stream

    def __next__(self) -> InferResult:
        result = self._thread.run(self._stream.next())
        if result is None:
            raise StopIteration
        return result

    def close(self) -> None:
        with contextlib.suppress(ConchError):  # the server is closed, and its requests have ended
            self._thread.run(self._stream.aclose())


# Code that reads the server's tables or its loop's clock runs on that loop.


async def _in_flight(server: AsyncServer, models: Collection[str]) -> int:
    return server.in_flight(models)


async def _infer(held: HeldModel, request: OutgoingRequest) -> InferResult:
    response = inprocess.infer(held.model, request)
    asyncio.get_running_loop().call_soon(held.release)  # runs after the next step, which submits the request
    return await response


async def _stream(held: HeldModel, request: OutgoingRequest) -> LocalStream:
    try:
        return LocalStream(held.model, request)
    finally:
        held.release()


async def _release(held: HeldModel) -> None:
    held.release()


def _close_unclosed(server: AsyncServer, thread: LoopThread, name: str) -> None:
    """Close a server that was not closed before it was collected or the process exited; runs in any thread."""
    if thread.is_forked:
        return
    warnings.warn(f"unclosed server {name}", ResourceWarning, stacklevel=2)
    if thread.is_current:
        threading.Thread(target=_close, args=(server, thread, 0), name="conch-closing").start()
    else:
        _close(server, thread, 0)  # no caller is left to wait for responses


def _close(server: AsyncServer, thread: LoopThread, seconds: float | None = None) -> None:
    try:
        thread.run(server.close(seconds))
    finally:
        thread.close()


def serve(
    model: str | os.PathLike[str] | None = None,
    /,
    *,
    model_repository: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    **flags: Any,
) -> int:
    """Serve models until SIGINT or SIGTERM, as ``conch serve`` does; returns the exit status.

    The arguments are those of :class:`conch.Server`; the defaults of ports and logging are those of the command. The
    caller's signal handlers are restored afterwards. Raises ConchError if the server cannot start, and outside the main
    thread, because only the main thread receives signals.
    """
    serving_plan = plan(model, model_repository, flags, ports=True)
    if threading.current_thread() is not threading.main_thread():
        raise unsupported("conch.serve waits for signals, which only the main thread receives: use conch.Server here")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise unsupported("conch.serve runs its own event loop: use conch.AsyncServer in a running one")
    with _restored_signal_handlers(), serving_plan.open() as (settings, name):
        return app.serve(settings, announcer(name) if name else None)


@contextlib.contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore the process's handlers of SIGINT and SIGTERM, which an event loop replaces with its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None is a handler that was not installed from Python
                signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
