"""HTTP transport to another server: a connection for each concurrent request, reused for later requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, cast

from conch.client.connection import TlsContents, connect_failure
from conch.client.http1 import JSON_SIZE, HttpFault, HttpResponse, ResponseReader, request_head
from conch.client.transport import LostError, UnreachableError
from conch.config import render
from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import Buffer
from conch.wire.json.outgoing import decode_error, decode_response, encode_request, model_path

_NO_TLS: Final = TlsContents()


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The model on another server: its ``name`` and ``version`` there (-1 is any), and how to connect.

    ``connect_timeout`` is in seconds. ``headers`` are sent with each request; their names are lower case.
    """

    name: str
    version: int = -1
    connect_timeout: float = 3.0
    decoupled: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: TlsContents = _NO_TLS


class RemoteHttpConnection(asyncio.Protocol):
    """A connection; ``on_closed`` is called once at its end, with whether the server closed it while it was idle."""

    def __init__(self, on_closed: Callable[[RemoteHttpConnection, bool], None]) -> None:
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._response: asyncio.Future[HttpResponse] | None = None
        self._ended_here = False
        #: Time of the last complete response (s, monotonic).
        self.since = monotonic()
        self._loop = asyncio.get_running_loop()
        self._reader = ResponseReader()

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._response is None

    async def exchange(self, parts: Sequence[Buffer]) -> HttpResponse:
        """Send a request and wait for its response. Raises :class:`LostError` if the connection breaks first.

        Cancelling closes the connection, so that the server cancels the request.
        """
        assert self._transport is not None
        self._reader.begin()
        response: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._response = response
        self._transport.writelines(parts)
        try:
            return await response
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection at once."""
        self._ended_here = True
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of asyncio's

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.close()  # data without a request
            return
        try:
            if self._reader.feed(data):
                self._complete()
        except HttpFault:
            self._fail(unavailable("it is not a server for this protocol (the response is not HTTP)"))
            self.close()

    def eof_received(self) -> bool:
        if self._response is not None:
            with suppress(HttpFault):
                self._reader.end()
                self._complete()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        idle = self._response is None and not self._ended_here
        self._fail(LostError(f"the connection broke ({error or 'it was closed by the other end'})"))
        self._on_closed(self, idle)

    def _complete(self) -> None:
        response, self._response = self._response, None
        self.since = monotonic()
        if not self._reader.keep_alive:
            self.close()
        if response is not None and not response.done():
            response.set_result(self._reader.response())

    def _fail(self, error: Exception) -> None:
        response, self._response = self._response, None
        if response is not None and not response.done():
            response.set_exception(error)


#: Messages for a proxy's refusals; KServe servers do not return these statuses.
_REFUSALS: Final = {
    401: "it requires other credentials (HTTP 401; 'authorization_env' names them)",
    403: "it forbids the request (HTTP 403)",
    407: "a proxy requires credentials (HTTP 407)",
}
_NO_SERVER: Final = "it is not a server for this protocol"
#: Maximum number of connections to a server, with a request each; further requests wait for a connection.
MOST_CONNECTIONS: Final = 512
#: Maximum idle time of a reused connection (s); servers close idle connections after a minute or more.
_IDLE_SECONDS: Final = 30.0


class RemoteHttp:
    """Connections to one server; see :class:`conch.server.execution.remote.executor.RemoteTransport`."""

    def __init__(self, url: RemoteUrl, model: RemoteModel) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        self._url = url
        self._model = model
        self._idle: list[RemoteHttpConnection] = []
        self._open: set[RemoteHttpConnection] = set()
        self._connection_slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._path = f"{url.path}{model_path(model.name, model.version)}"
        self._headers = {"host": url.address, **model.headers}

    async def check(self) -> None:
        seconds = self._model.connect_timeout
        response = await self._get("/ready", seconds)
        if response.status == 200:
            return
        self._refuse(response)
        metadata = await self._get("", seconds)  # its error shows whether the model exists
        error = decode_error(metadata.status, metadata.body)
        if metadata.status == 200 or "not at ready state" in error.message or error.code is Code.UNAVAILABLE:
            raise unavailable(f"model '{self._model.name}' is not ready there")
        if metadata.status in (400, 404) and metadata.body.startswith(b'{"error"'):
            raise unavailable(f"it has no model '{self._model.name}' ({error.message})")
        raise unavailable(f"{_NO_SERVER} (GET {self._path} returns HTTP {metadata.status})")

    async def config(self) -> ModelConfig:
        response = await self._get("/config", None)
        if response.status != 200:
            self._refuse(response)
            raise decode_error(response.status, response.body)
        try:
            return render.from_json(response.body.decode(), lenient=True)
        except (ConchError, UnicodeDecodeError) as error:
            raise unavailable(f"{_NO_SERVER} ({error})") from None

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        header, blobs = encode_request(request)
        headers = {**self._headers, "content-type": "application/octet-stream", JSON_SIZE: str(len(header))}
        head = request_head("POST", f"{self._path}/infer", headers, len(header) + sum(map(len, blobs)))
        async with asyncio.timeout(seconds), self._connection_slots:
            response = await self._exchange([head + header, *blobs])
        if response.status != 200:
            self._refuse(response)
            raise decode_error(response.status, response.body)
        deliver(decode_response(response.body, response.json_size))

    async def close(self) -> None:
        self._closed = True
        for connection in list(self._open):
            connection.close()

    async def _get(self, path: str, seconds: float | None) -> HttpResponse:
        parts = [request_head("GET", self._path + path, self._headers)]
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._exchange(parts)
                except LostError:  # the server may have just closed an idle connection
                    return await self._exchange(parts, fresh=True)
        except TimeoutError:
            raise unavailable(f"no response within {seconds or 0:g} s") from None

    async def _exchange(self, parts: Sequence[Buffer], *, fresh: bool = False) -> HttpResponse:
        connection = (None if fresh else self._take_idle()) or await self._connect()
        response = await connection.exchange(parts)
        if connection.usable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _take_idle(self) -> RemoteHttpConnection | None:
        """The most recently used idle connection; None if all are so old that the server may be closing them."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and monotonic() - connection.since < _IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> RemoteHttpConnection:
        url = self._url
        if self._closed:
            raise UnreachableError("the model is being unloaded")
        try:
            async with asyncio.timeout(self._model.connect_timeout):
                _, connection = await self._loop.create_connection(
                    lambda: RemoteHttpConnection(self._on_closed),
                    url.host,
                    url.port,
                    ssl=self._model.tls.context if url.is_encrypted else None,
                )
        except TimeoutError:
            raise UnreachableError(f"no connection within {self._model.connect_timeout:g} s") from None
        except (OSError, UnicodeError) as error:
            raise UnreachableError(connect_failure(error, url.host)) from None
        self._open.add(connection)
        return connection

    def _on_closed(self, connection: RemoteHttpConnection, idle: bool) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if idle and not self._closed:
            self.on_broken()

    def _refuse(self, response: HttpResponse) -> None:
        """Raise UNAVAILABLE for a refusal by a proxy in front of the server."""
        if response.status in _REFUSALS:
            raise unavailable(_REFUSALS[response.status])
