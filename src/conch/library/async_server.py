"""A server inside the process, on the caller's event loop."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any, Self

from conch.client.deadline import Deadline
from conch.client.requests import OutgoingRequest, version_number
from conch.client.results import InferResult
from conch.client.service import AsyncInferenceService, AsyncResultStream
from conch.core.errors import ConchError, unavailable, unsupported
from conch.core.inference import ModelSignature
from conch.library import inprocess
from conch.library.app import Application
from conch.library.flags import plan
from conch.machine import logs
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded

# Used by ``AsyncServer``; runs on the server's event loop.


class PendingStream(AsyncResultStream):
    """A stream whose request ``send`` makes once its model is loaded; it may be read before that."""

    def __init__(self, needed: LoadNeeded, send: Callable[[], AsyncResultStream], deadline: Deadline) -> None:
        self._send = send
        self._deadline = deadline
        self._sent = asyncio.Event()
        self._stream: AsyncResultStream | None = None
        self._error: Exception | None = None
        self._give_up = needed.then(self._begin)

    async def __anext__(self) -> InferResult:
        try:
            async with asyncio.timeout(self._deadline.left()):
                await self._sent.wait()
        except TimeoutError:
            await self.aclose()
            raise unavailable(f"the model was not loaded within {self._deadline.timeout or 0:g} s") from None
        if self._error is not None:
            raise self._error
        if self._stream is None:
            raise StopAsyncIteration
        return await anext(self._stream)

    async def aclose(self) -> None:
        self._give_up()
        self._sent.set()
        if self._stream is not None:
            await self._stream.aclose()

    def _begin(self, load_error: ConchError | None) -> None:
        """Send the request; called when the model is loaded or its load has failed."""
        if self._sent.is_set():
            return
        try:
            if load_error is not None:
                raise load_error
            self._stream = self._send()
        except ConchError as error:
            self._error = error
        self._sent.set()


class AsyncServer(AsyncInferenceService):
    """Serves models inside the process: ``async with conch.AsyncServer(model_repository="models") as server``.

    ``model`` is a single model in place of a repository, as for ``conch serve MODEL``: an ID on the Hub, the directory
    of a checkpoint, or a model file. ``flags`` are the options of ``conch serve`` with underscores, including those for
    a single model. Models run in worker processes.

    No port is opened unless ``http_port``, ``grpc_port``, ``metrics_port`` or ``openai_port`` is given (0 for any free
    port), or ``ports=True``, which opens the ports of ``conch serve``; ``urls`` has their addresses. Log messages go
    through ``logging`` only, unless a ``log_…`` option is given.

    The server belongs to the event loop that starts it. The constructor raises INVALID_ARG for invalid options.
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
        self._plan = plan(model, model_repository, flags, ports=ports)
        self._application: Application | None = None
        self._resources = ExitStack()
        self._model_name = ""
        self._closing: asyncio.Task[None] | None = None
        self._started = False

    async def start(self) -> Self:
        """Start; returns this server when its models are loaded.

        If it cannot start, closes everything and raises the cause. A server can be started only once.
        """
        if self._started or self._closing is not None:
            raise unavailable("a server can be started only once: create another one")
        self._started = True
        self._loop = asyncio.get_running_loop()
        try:
            settings, self._model_name = self._resources.enter_context(self._plan.open())
            if self._plan.logs:
                self._resources.callback(logs.reset, logs.setup(settings.log_settings))
            self._application = application = Application(settings)
            await application.listen()
            await application.load_models()
        except BaseException:
            await self._close(0)
            raise
        return self

    async def close(self, seconds: float | None = None) -> None:
        """Complete the in-flight requests, stop the workers and close the ports.

        Requests that take longer than ``seconds`` fail; the default is the option ``exit_timeout_secs``.
        """
        await self._close(self._plan.settings.exit_timeout_secs if seconds is None else seconds)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        application = getattr(self, "_application", None)
        if application is None or self._closing is not None:
            return
        _warn(f"unclosed server {self!r}", ResourceWarning, source=self)
        application.abandon()
        self._resources.close()

    @property
    def model_name(self) -> str:
        """The name of the single model that this server serves; empty if it serves a repository."""
        return self._model_name

    @property
    def urls(self) -> dict[str, str]:
        """The URLs of the open ports: ``http``, ``grpc``, ``metrics`` and ``openai``."""
        addresses = {} if self._application is None else self._application.addresses
        listeners = self._plan.settings.listeners
        return {kind: _url(kind, host, port, listeners[kind].encrypted) for kind, (host, port) in addresses.items()}

    def in_flight(self, models: Collection[str] = ()) -> int:
        """Return the number of in-flight requests of ``models``, or of all models.

        A request to an ensemble counts in addition to those of its steps.
        """
        return self._core.in_flight(models)

    async def live(self, *, timeout: float | None = None) -> bool:
        Deadline.after(timeout)  # only checks it: this returns at once
        return self._closing is None and self._application is not None and self._application.server.live

    async def ready(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> bool:
        if not await self.live(timeout=timeout):
            return False
        return self._core.model_ready(model, version_number(version)) if model else self._core.ready

    async def metadata(
        self, model: str = "", version: int | str = "", *, timeout: float | None = None
    ) -> dict[str, Any]:
        deadline = Deadline.after(timeout)
        if not model:
            return self._core.metadata()
        await self._loaded(model, version_number(version), deadline)
        return self._core.model_metadata(model, version_number(version))

    async def config(self, model: str, version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        served = await self._loaded(model, version_number(version), Deadline.after(timeout))
        document: dict[str, Any] = json.loads(served.config_json)
        return document

    async def labels(
        self, model: str, version: int | str = "", *, timeout: float | None = None
    ) -> dict[str, list[str]]:
        """Return the class labels by output, for the outputs that have labels."""
        served = await self._loaded(model, version_number(version), Deadline.after(timeout))
        labels = {output: served.labels(output) for output in served.signature.outputs}
        return {output: list(names) for output, names in labels.items() if names}

    async def statistics(
        self, model: str = "", version: int | str = "", *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        Deadline.after(timeout)  # only checks it: this returns at once
        return self._core.statistics(model, version_number(version))

    async def models(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        async with _bounded(timeout):
            return await self._core.index()

    async def load(
        self,
        model: str,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        self._require_control()
        text = json.dumps(dict(config)) if isinstance(config, Mapping) else config
        async with _bounded(timeout):
            await self._core.load(model, text, files)

    async def unload(self, model: str, dependents: bool = False, *, timeout: float | None = None) -> None:
        self._require_control()
        async with _bounded(timeout):
            await self._core.unload(model, dependents)

    def _signature(self, model: str, version: int) -> ModelSignature:
        return self._core.model(model, version).signature

    async def _loaded_signature(self, model: str, version: int, deadline: Deadline) -> ModelSignature:
        return (await self._loaded(model, version, deadline)).signature

    async def _hold_model(self, model: str, version: int, deadline: Deadline) -> inprocess.HeldModel:
        """Return a model that stays loaded while another thread builds its request."""
        return inprocess.HeldModel(await self._loaded(model, version, deadline))

    async def _loaded(self, model: str, version: int, deadline: Deadline) -> Model:
        with suppress(LoadNeeded):
            return self._core.model(model, version)
        try:
            async with asyncio.timeout(deadline.left()):
                return await self._core.loaded_model(model, version)
        except TimeoutError:
            raise unavailable(f"model '{model}' was not loaded within {deadline.timeout or 0:g} s") from None

    def _sent(self, send: Callable[[], AsyncResultStream], deadline: Deadline) -> AsyncResultStream:
        try:
            return send()
        except LoadNeeded as needed:
            return PendingStream(needed, send, deadline)

    async def _infer(self, request: OutgoingRequest) -> InferResult:
        return await inprocess.infer(self._core.model(request.model, request.version), request)

    def _stream(self, request: OutgoingRequest) -> inprocess.LocalStream:
        return inprocess.LocalStream(self._core.model(request.model, request.version), request)

    @property
    def _core(self) -> InferenceServer:
        """The server. Raises UNAVAILABLE before it is started and after it is closed."""
        if self._closing is not None:
            raise unavailable("the server is closed")
        if self._application is None:
            raise unavailable("the server is not started: use it as a context manager, or call start()")
        self._require_its_loop()
        return self._application.server

    def _require_its_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:  # otherwise the call would wait forever
            raise unsupported(
                "the server is bound to the event loop that started it: call it there, or use conch.Server"
            )

    def _require_control(self) -> None:
        mode = self._core.settings.model_control_mode
        if mode in ("none", "poll"):
            raise unavailable(
                f"load and unload require model_control_mode 'explicit' or 'on-demand'; this server has '{mode}'"
            )

    async def _close(self, seconds: float) -> None:
        """Stop once, regardless of the number of calls; cancelling a call does not interrupt the stop."""
        if self._started:
            self._require_its_loop()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._stop(seconds))
        cancelled = False
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError:
                cancelled = True
        self._closing.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _stop(self, seconds: float) -> None:
        try:
            if self._application is not None:
                await self._application.stop(seconds)
        finally:
            self._resources.close()


@asynccontextmanager
async def _bounded(timeout: float | None) -> AsyncIterator[None]:
    """Cancel the body after ``timeout`` seconds and raise UNAVAILABLE."""
    deadline = Deadline.after(timeout)
    try:
        async with asyncio.timeout(timeout) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise deadline.no_response("") from None


def _url(kind: str, host: str, port: int, encrypted: bool) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'grpc' if kind == 'grpc' else 'http'}{'s' if encrypted else ''}://{shown}:{port}"
