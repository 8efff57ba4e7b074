"""Sends the requests of a model to other servers at once; only those servers have queues.

:func:`complete_remote` completes the configuration of a remote model from its servers, :func:`make_executor` loads it.
The credentials of transports come from files and from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Final, NamedTuple, Protocol

from conch.client.connection import TlsContents, TlsFiles
from conch.client.transport import ConnectionFailedError, LostError, UnreachableError
from conch.config import render
from conch.config.complete import normalise
from conch.config.remote import RemoteSettings, RemoteUrl, check_urls, read_remote, read_url, take_over
from conch.config.schema import ModelConfig, copied, scheduler
from conch.core.errors import QUEUE_FULL, Code, ConchError, cancelled, internal, invalid, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.server.execution.executor import Executor
from conch.server.execution.remote.endpoints import Assignment, Endpoints, LostSequences
from conch.server.execution.remote.http_calls import RemoteHttp, RemoteModel
from conch.telemetry.statistics import ModelStatistics
from conch.workers.child.packing import OutputWatch

LOG = logging.getLogger("conch")


class RemoteTransport(Protocol):
    """Connections to one server, on the event loop.

    Methods raise UnreachableError or LostError (:mod:`conch.client.transport`), or the server's error as a ConchError.
    ``on_broken`` is called when a connection has broken, because the server may be gone.
    """

    on_broken: Callable[[], None]

    async def check(self) -> None:
        """Return if the model is ready; otherwise raise UNAVAILABLE with the reason."""

    async def config(self) -> ModelConfig:
        """The model's configuration on the server. There is no timeout: the server may have to load the model."""

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        """Send a request and pass its responses to ``deliver``; the last one is final. Cancelling cancels the request.

        Raises TimeoutError after ``seconds``.
        """

    async def close(self) -> None:
        """Close all connections; in-flight requests end with them."""


#: Creates the transport to a server.
Connect = Callable[[RemoteUrl], RemoteTransport]


#: Delay before the second health check of an unavailable server (s); it doubles with each failure.
_FIRST_DELAY: Final = 0.1
_MOST_DOUBLINGS: Final = 20


class HealthWatch:
    """Checks the health of a server periodically.

    After each check, calls ``on_verdict`` with the reason why the server cannot be used (empty if it can) and whether
    it is gone. Checks run every ``interval`` seconds, sooner after a failure, and at once after :meth:`look`.
    """

    def __init__(self, transport: RemoteTransport, interval: float, on_verdict: Callable[[str, bool], None]) -> None:
        self._transport = transport
        self._interval = interval
        self._on_verdict = on_verdict
        self._check_now = asyncio.Event()
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run())
        transport.on_broken = self.look

    def look(self) -> None:
        """Check now, because of an event."""
        self._check_now.set()

    async def first(self) -> None:
        """Wait until the first check has completed."""
        await asyncio.shield(self._first)

    def stop(self) -> None:
        self._task.cancel()
        if not self._first.done():
            self._first.set_result(None)

    async def _run(self) -> None:
        failures = 0  # number of consecutive failures
        while True:
            self._check_now.clear()
            reason, gone = await self._check()
            self._on_verdict(reason, gone)
            if not self._first.done():
                self._first.set_result(None)
            failures = min(failures + 1, _MOST_DOUBLINGS) if reason else 0
            delay = min(self._interval, _FIRST_DELAY * 2 ** (failures - 1)) if failures else self._interval
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._check_now.wait()

    async def _check(self) -> tuple[str, bool]:
        try:
            await self._transport.check()
        except ConnectionFailedError as error:
            return error.message, True
        except ConchError as error:
            return error.message, False
        except Exception as error:
            LOG.exception("the readiness of a remote model could not be checked")
            return f"it could not be checked: {error!r}", False
        return "", False


#: Delay before a request is sent again to the only server, after it could not be reached (s).
BACK_OFF: Final = 0.1
#: Error codes of a server that is unloading the model; they have other causes too.
_OF_A_MODEL_THAT_LEAVES: Final = frozenset((Code.NOT_FOUND, Code.UNAVAILABLE))
_STOPPING: Final = "the model is being unloaded"
_RETIRED: Final = "the model was reloaded or unloaded"


class _Server(NamedTuple):
    """The connections to a server, and its health checks."""

    transport: RemoteTransport
    health: HealthWatch


@dataclass(slots=True, eq=False)
class _InFlightRequest:
    """An in-flight request: its server, the task of the previous request in its sequence, and the servers tried."""

    request: InferRequest
    assignment: Assignment
    before: asyncio.Task[None] | None = None
    tried: set[str] = field(default_factory=set)


class RemoteSequences:
    """Sequence state shared by all remote models, so that a reload neither splits nor mixes sequences.

    ``last`` has the last task of each sequence with in-flight requests, by model and correlation ID.
    """

    def __init__(self) -> None:
        self.lost = LostSequences()
        self.last: dict[tuple[str, int | str], asyncio.Task[None]] = {}


class RemoteExecutor(Executor):
    """The executor of a remote model.

    ``endpoints`` are its servers and may change at any time. At most ``limit`` requests are in flight. ``key``
    identifies the model in ``sequences``, which all remote models share. ``watch`` warns of outputs that differ from
    the model's configuration.
    """

    def __init__(
        self,
        name: str,
        settings: RemoteSettings,
        connect: Connect,
        statistics: ModelStatistics,
        *,
        decoupled: bool,
        limit: int,
        idle_seconds: float,
        key: str = "",
        sequences: RemoteSequences | None = None,
        watch: OutputWatch | None = None,
    ) -> None:
        self._name = name
        self._key = key
        self._settings = settings
        self._connect = connect
        self._statistics = statistics
        self._decoupled = decoupled
        self._limit = limit
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._servers: dict[str, _Server] = {}
        self._tasks: dict[InferRequest, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False
        sequences = sequences if sequences is not None else RemoteSequences()
        self._last_of = sequences.last
        self.endpoints = Endpoints(
            monotonic,
            idle_seconds=idle_seconds,
            key=key,
            lost=sequences.lost,
            check=lambda urls: check_urls(urls, decoupled=decoupled, model=name),
            on_added=self._add,
            on_gone=self._remove,
        )

    # Executor interface

    @property
    def ready(self) -> bool:
        """Whether a server can take a request now."""
        return not self.endpoints.reason

    @property
    def unavailable_reason(self) -> str:
        """The reason why no server can take a request; empty if one can."""
        return self.endpoints.reason

    @property
    def sequences(self) -> int:
        return self.endpoints.sequences

    def continues(self, request: InferRequest) -> bool:
        return self.endpoints.continues(request)

    def submit(self, request: InferRequest) -> None:
        """Send a request; raises UNAVAILABLE at once if no server can take it or too many requests are in flight."""
        if self._stopped:
            raise unavailable(f"model '{self._name}' is not available: {_STOPPING}")
        if len(self._tasks) >= self._limit:
            raise request.error(QUEUE_FULL, Code.UNAVAILABLE)
        request.hold_copies()
        assignment = self.endpoints.take(request, self._affinity(request))
        request.times.queued = request.times.started = monotonic_ns()
        request.on_cancel = self._cancel
        sequence = self._key, request.correlation_id
        before = self._last_of.get(sequence) if assignment.sequence is not None else None
        call = _InFlightRequest(request, assignment, before)
        task = self._tasks[request] = self._loop.create_task(self._run(call))
        if assignment.sequence is not None:
            self._last_of[sequence] = task
        task.add_done_callback(partial(self._ended, call))

    def retire(self) -> None:
        self.endpoints.retire(_RETIRED)

    def abandon(self) -> None:
        """Fail and cancel all in-flight requests."""
        for request, task in list(self._tasks.items()):
            request.fail(unavailable(f"model '{self._name}' is not available: {_STOPPING}"))
            task.cancel()

    async def stop(self, seconds: float | None) -> None:
        """Close all connections when the in-flight requests have ended, or after ``seconds``."""
        if self._tasks and seconds:
            await asyncio.wait(list(self._tasks.values()), timeout=seconds)
        self._stopped = True
        self.abandon()
        for url in list(self._servers):
            self._remove(url)
        if self._closing:
            await asyncio.wait(list(self._closing))

    # Specific to remote models

    async def start(self) -> None:
        """Use the servers in the configuration; wait for their first health checks.

        Returns when one server is ready or all have been checked.
        """
        self.endpoints.update(self._settings.urls)
        waiting = {self._loop.create_task(server.health.first()) for server in self._servers.values()}
        while waiting and not self.ready:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def config(self) -> ModelConfig:
        """The model's configuration from the first server that returns it. Raises UNAVAILABLE if none does."""
        reasons = []
        for url, server in self._servers.items():
            try:
                return await self._config(server.transport)
            except ConchError as error:
                reasons.append(f"{url}: {error.message}")
        raise unavailable("; ".join(reasons) or self.unavailable_reason)

    async def _config(self, transport: RemoteTransport) -> ModelConfig:
        """The model's configuration on a server, which may load the model first: waits while it is ready there."""
        await transport.check()
        config = self._loop.create_task(transport.config())
        try:
            while not (await asyncio.wait([config], timeout=self._settings.connect_timeout))[0]:
                await transport.check()
            return await config
        finally:
            config.cancel()

    def _add(self, url: str) -> None:
        if self._stopped:
            return
        transport = self._connect(read_url(url))
        health = HealthWatch(transport, self._settings.health_interval, partial(self._judge, url))
        self._servers[url] = _Server(transport, health)

    def _remove(self, url: str) -> None:
        server = self._servers.pop(url, None)
        if server is None:
            return
        server.health.stop()
        closing = self._loop.create_task(server.transport.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _judge(self, url: str, reason: str, gone: bool) -> None:
        if self.endpoints.mark(url, reason, gone=gone):
            if reason:
                LOG.warning("remote model '%s': %s cannot be used: %s", self._name, url, reason)
            else:
                LOG.info("remote model '%s': %s is ready", self._name, url)

    def _affinity(self, request: InferRequest) -> bytes:
        """The affinity key of a request: its sequence, the model, or the start of the first text in an input.

        All servers with the same endpoints choose the same endpoint for a key.
        """
        if request.correlation_id:
            return f"sequence {request.correlation_id}".encode()
        if self._settings.sticky:
            return f"model {self._name}".encode()
        tensor = request.inputs.get(self._settings.affinity) if self._settings.affinity else None
        if tensor is None:
            return b""
        view = memoryview(tensor.data)
        length = int.from_bytes(view[:4], "little")
        return bytes(view[4 : 4 + min(length, self._settings.affinity_bytes)])

    def _cancel(self, request: InferRequest) -> None:
        task = self._tasks.get(request)
        request.fail(cancelled())
        if task is not None:
            task.cancel()

    def _ended(self, call: _InFlightRequest, task: asyncio.Task[None]) -> None:
        """Release the assignment of a request that has ended, even if it was cancelled before it was sent."""
        request = call.request
        del self._tasks[request]
        if request.cancelled and not request.responded:
            self.endpoints.fail(request, call.assignment, "a request before this one was cancelled")
        self.endpoints.release(request, call.assignment)
        sequence = self._key, request.correlation_id
        if self._last_of.get(sequence) is task:
            del self._last_of[sequence]

    async def _run(self, call: _InFlightRequest) -> None:
        """Send a request after the previous request in its sequence, and make sure that it ends."""
        request = call.request
        try:
            ends = self._ends(request)
            before, call.before = call.before, None
            if before is not None:
                seconds = None if ends is None else max(ends - monotonic(), 0.0)
                _, late = await asyncio.wait([before], timeout=seconds)
                if late:
                    raise self._too_late(call)
            self.endpoints.follow(request, call.assignment)
            await self._attempt(call, ends)
        except ConchError as error:
            request.fail(error)
        except asyncio.CancelledError:
            request.fail(cancelled())
        except Exception as error:
            url = call.assignment.url
            LOG.exception("a request could not be forwarded to %s", url)
            request.fail(internal(f"the request could not be forwarded to {url}: {error!r}"))

    async def _attempt(self, call: _InFlightRequest, ends: float | None) -> None:
        """Send a request to its server, and to another server if that one cannot be reached.

        If there is no other server, try the same one once more.
        """
        request = call.request
        connect_until = monotonic() + self._settings.connect_timeout
        waited = repeated = False
        while True:
            url = call.assignment.url
            try:
                await self._send(call, url, ends)
                return
            except UnreachableError as error:
                self._suspect(url)
                failure = error.message
            except LostError as error:
                self._suspect(url)
                failure = f"{error.message}; the request may have run there"
                if repeated or not self._may_repeat(request):
                    self.endpoints.fail(request, call.assignment, f"{url} has lost a request before this one")
                    raise unavailable(f"{url}: {failure}") from None
                repeated = waited = True
            if self._moved(call):
                continue
            if waited or monotonic() + BACK_OFF > connect_until:
                self.endpoints.fail(request, call.assignment, f"a request before this one did not reach {url}")
                raise unavailable(f"model '{self._name}' is not available: {url}: {failure}")
            waited = True
            await asyncio.sleep(BACK_OFF)

    async def _send(self, call: _InFlightRequest, url: str, ends: float | None) -> None:
        """Send a request to a server and deliver its responses."""
        request = call.request
        seconds = None if ends is None else max(ends - monotonic(), 0.001)
        request.times.started = monotonic_ns()
        try:
            await self._servers[url].transport.infer(request, seconds, partial(self._deliver, request))
        except TimeoutError:
            self._note_times(request)
            raise self._too_late(call) from None
        except UnreachableError:
            raise
        except ConchError as error:
            self._note_times(request)
            if error.code in _OF_A_MODEL_THAT_LEAVES:
                self._suspect(url)
            raise

    def _too_late(self, call: _InFlightRequest) -> ConchError:
        """The error for a request after its deadline; its sequence fails too."""
        request, url = call.request, call.assignment.url
        self.endpoints.fail(request, call.assignment, f"{url} did not respond to an earlier request in time")
        return unavailable(f"no response from {url} within {(monotonic_ns() - request.times.queued) / 1e9:.3g} s")

    def _deliver(self, request: InferRequest, response: InferResponse) -> None:
        """Pass a response to its request, unless that has ended."""
        if request.finished:
            return
        request.responded = True
        if self._watch is not None and response.error is None:
            outputs = [(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in response.outputs]
            named = bool(request.outputs)
            requested = frozenset(request.outputs) if named else self._watch.declared.keys()
            rows = request.batch_size if self._watch.batches and not self._decoupled else None
            self._watch.check(outputs, requested, named and not self._decoupled, rows)
            if not named:
                response.outputs = [tensor for tensor in response.outputs if tensor.name in requested]
        if self._decoupled:
            self._statistics.record_sent(request, response)
        if response.final:
            self._note_times(request)
        request.respond(response)

    def _note_times(self, request: InferRequest) -> None:
        """Record an execution; its duration includes the network."""
        infer = request.times.compute_infer = monotonic_ns() - request.times.started
        self._statistics.record_execution(request.batch_size, 0, infer, 0)

    def _suspect(self, url: str) -> None:
        """Check the health of a server at once, after a request to it failed."""
        server = self._servers.get(url)
        if server is not None:
            server.health.look()

    def _moved(self, call: _InFlightRequest) -> bool:
        """Move a request to an untried server; False if there is none or its sequence has already started."""
        request, assignment = call.request, call.assignment
        call.tried.add(assignment.url)
        if assignment.sequence is not None and not self.endpoints.begins(request):
            return False
        try:
            self.endpoints.move(request, assignment, self._affinity(request), call.tried)
        except ConchError:
            return False
        return True

    def _may_repeat(self, request: InferRequest) -> bool:
        """Whether a request that may have run can be sent again."""
        return self._settings.repeat_lost and not self._decoupled and not request.correlation_id

    def _ends(self, request: InferRequest) -> float | None:
        """The deadline of a request (s, monotonic), from the configuration and the request, or None."""
        limits = [seconds for seconds in (self._settings.timeout, request.timeout / 1e6) if seconds]
        return request.times.queued / 1e9 + min(limits) if limits else None


#: Default idle time after which a sequence is no longer pinned to its server (s).
_IDLE_SECONDS: Final = 600.0


async def complete_remote(config: ModelConfig, directory: Path) -> ModelConfig:
    """Complete ``config`` with the configuration on a server of the model; unchanged if it has inputs or outputs.

    Raises UNAVAILABLE if no server returns its configuration.
    """
    settings = read_remote(config).of_version(-1)
    if config.input or config.output:
        return config
    executor = RemoteExecutor(
        config.name,
        settings,
        await connecting(settings, directory, decoupled=False),
        ModelStatistics(config.name, 0),
        decoupled=False,
        limit=0,
        idle_seconds=_IDLE_SECONDS,
    )
    try:
        await executor.start()
        theirs = await executor.config()
    except ConchError as error:
        raise unavailable(
            f"the configuration of remote model '{config.name}' cannot be completed: {error.message}. With "
            "inputs and outputs in its configuration, it can load while its server is unavailable"
        ) from None
    finally:
        await executor.stop(0)
    return _merged(config, theirs)


def _merged(config: ModelConfig, theirs: ModelConfig) -> ModelConfig:
    completed = copied(config)
    take_over(completed, theirs)
    normalise(completed)
    read_remote(completed)  # the decoupled property is known only now: check that the addresses support it
    return completed


async def make_executor(
    config: ModelConfig,
    version: int,
    directory: Path,
    statistics: ModelStatistics,
    limit: int,
    key: str,
    sequences: RemoteSequences,
) -> RemoteExecutor:
    """Create and start the executor of a model version with a completed configuration.

    ``limit`` is the maximum number of in-flight requests; for ``key`` and ``sequences`` see :class:`RemoteExecutor`.
    """
    settings = read_remote(config).of_version(version)
    decoupled = config.model_transaction_policy.decoupled
    idle = _IDLE_SECONDS
    if scheduler(config) == "sequence_batching":
        idle = config.sequence_batching.max_sequence_idle_microseconds / 1e6
    watch = OutputWatch(config.name, lambda message: LOG.warning("%s", message))
    watch.declare(json.loads(render.to_json(config)))
    executor = RemoteExecutor(
        config.name,
        settings,
        await connecting(settings, directory, decoupled=decoupled),
        statistics,
        decoupled=decoupled,
        limit=limit,
        idle_seconds=idle,
        key=key,
        sequences=sequences,
        watch=watch,
    )
    try:
        await executor.start()
    except BaseException:
        await executor.stop(0)
        raise
    return executor


async def connecting(settings: RemoteSettings, directory: Path, *, decoupled: bool) -> Connect:
    """Return a function that creates transports to the servers of a model; files are read in a thread.

    Raises INVALID_ARG for unusable files, unset environment variables and invalid headers.
    """
    model = RemoteModel(
        settings.model,
        settings.version,
        settings.connect_timeout,
        decoupled,
        _headers(settings),
        await asyncio.to_thread(_read_tls, settings, directory),
    )
    return partial(_connect, model)


def _connect(model: RemoteModel, url: RemoteUrl) -> RemoteTransport:
    if not url.is_grpc:
        return RemoteHttp(url, model)
    from conch.server.execution.remote.grpc_calls import RemoteGrpc  # imports gRPC, which most servers do not need

    return RemoteGrpc(url, model)


def _headers(settings: RemoteSettings) -> dict[str, str]:
    """The headers of each request; their values come from environment variables, never from the configuration."""
    headers: dict[str, str] = {}
    for line in _variable("headers_env", settings.headers_env).splitlines():
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise invalid(f"environment variable '{settings.headers_env}' must have 'name: value' on each line")
        headers[name.strip().lower()] = value.strip()
    authorization = _variable("authorization_env", settings.authorization_env).strip()
    if authorization:
        headers["authorization"] = authorization
    for name, value in headers.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise invalid(f"header '{name}' from the environment has characters that are not allowed in headers")
    return headers


def _variable(parameter: str, name: str) -> str:
    if not name:
        return ""
    value = os.environ.get(name)
    if value is None:
        raise invalid(f"environment variable '{name}', which parameter '{parameter}' names, is not set")
    return value


def _read_tls(settings: RemoteSettings, directory: Path) -> TlsContents:
    """Read the files for encrypted connections; blocking."""
    names = (settings.ca_file, settings.certificate_file, settings.key_file)
    return TlsFiles(*(str(directory / name) if name else "" for name in names)).contents()
