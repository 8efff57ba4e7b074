"""HTTP transport to another server: a connection for each concurrent request, reused for later requests."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, NamedTuple, cast

import httptools

from conch.config import render
from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import Buffer
from conch.server.execution.remote.transport import LostError, RemoteModel, UnreachedError
from conch.wire.json.outgoing import decode_error, decode_response, encode_request, model_path


class HttpAnswer(NamedTuple):
    """A complete response; ``header_length`` is the number of JSON bytes in ``body``, None if all are."""

    status: int
    body: bytes
    header_length: int | None


class RemoteHttpConnection(asyncio.Protocol):
    """A connection; ``on_closed`` is called once at its end, with whether the server closed it while it was idle."""

    def __init__(self, on_closed: Callable[[RemoteHttpConnection, bool], None]) -> None:
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._ended_here = False
        #: Time of the last complete response (s, monotonic).
        self.since = monotonic()
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._header_length: int | None = None

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    async def exchange(self, parts: Sequence[Buffer]) -> HttpAnswer:
        """Send a request and wait for its response. Raises :class:`LostError` if the connection breaks first.

        Cancelling closes the connection, so that the server cancels the request.
        """
        assert self._transport is not None
        answer: asyncio.Future[HttpAnswer] = self._loop.create_future()
        self._answer = answer
        self._transport.writelines(parts)
        try:
            return await answer
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
        if self._answer is None:
            self.close()  # data without a request
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError):
            self._fail(unavailable("it is not a server for this protocol (its answer is not HTTP)"))
            self.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        idle = self._answer is None and not self._ended_here
        self._fail(LostError(f"the connection broke ({error or 'it was closed by the other end'})"))
        self._on_closed(self, idle)

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"inference-header-content-length" and value.isdigit():
            self._header_length = int(value)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), self._body
        if status < 200:  # an interim response, such as 100 Continue: the final response follows
            self._header_length = None
            return
        answer, self._answer = self._answer, None
        self.since = monotonic()
        if not self._parser.should_keep_alive():
            self.close()
        whole = body[0] if len(body) == 1 else b"".join(body)
        result = HttpAnswer(status, whole, self._header_length)
        self._begin()
        if answer is not None and not answer.done():
            answer.set_result(result)

    def _begin(self) -> None:
        """Prepare for the next response."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self._header_length = None

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)


#: Messages for a proxy's refusals; KServe servers do not return these statuses.
_REFUSALS: Final = {
    401: "it wants other credentials (HTTP 401; 'authorization_env' names them)",
    403: "it forbids the request (HTTP 403)",
    407: "a proxy wants credentials (HTTP 407)",
}
_NO_SERVER: Final = "it is not a server for this protocol"
#: Maximum number of connections to a server, with a request each; further requests wait for a connection.
MOST_CONNECTIONS: Final = 512
#: Maximum idle time of a reused connection (s); servers close idle connections after a minute or more.
_IDLE_SECONDS: Final = 30.0


class RemoteHttp:
    """Connections to one server; see :class:`conch.server.execution.remote.transport.RemoteTransport`."""

    def __init__(self, url: RemoteUrl, model: RemoteModel) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        self._url = url
        self._model = model
        self._idle: list[RemoteHttpConnection] = []
        self._open: set[RemoteHttpConnection] = set()
        self._connection_slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        path = f"{url.path}{model_path(model.name, model.version)}"
        lines = [f"host: {url.address}", *(f"{name}: {value}" for name, value in model.headers.items())]
        self._rest = ("\r\n".join(lines) + "\r\n").encode()
        self._path = path.encode()
        self._post = b"POST %s/infer HTTP/1.1\r\n%scontent-type: application/octet-stream\r\n" % (
            self._path,
            self._rest,
        )

    async def check(self) -> None:
        answer = await self._get(b"/ready")
        if answer.status == 200:
            return
        self._refuse(answer)
        metadata = await self._get(b"")  # its error shows whether the model exists
        error = decode_error(metadata.status, metadata.body)
        if metadata.status == 200 or "not at ready state" in error.message or error.code is Code.UNAVAILABLE:
            raise unavailable(f"model '{self._model.name}' is not ready there")
        if metadata.status in (400, 404) and metadata.body.startswith(b'{"error"'):
            raise unavailable(f"it has no model '{self._model.name}' ({error.message})")
        raise unavailable(f"{_NO_SERVER} (GET {self._path.decode()} gives HTTP {metadata.status})")

    async def config(self) -> ModelConfig:
        answer = await self._get(b"/config")
        if answer.status != 200:
            self._refuse(answer)
            raise decode_error(answer.status, answer.body)
        try:
            return render.from_json(answer.body.decode(), lenient=True)
        except (ConchError, UnicodeDecodeError) as error:
            raise unavailable(f"{_NO_SERVER} ({error})") from None

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        header, blobs = encode_request(request)
        size = len(header) + sum(map(len, blobs))
        lengths = b"content-length: %d\r\ninference-header-content-length: %d\r\n\r\n" % (size, len(header))
        parts = [self._post + lengths + header, *blobs]
        async with asyncio.timeout(seconds), self._connection_slots:
            answer = await self._exchange(parts)
        if answer.status != 200:
            self._refuse(answer)
            raise decode_error(answer.status, answer.body)
        deliver(decode_response(answer.body, answer.header_length))

    async def close(self) -> None:
        self._closed = True
        for connection in list(self._open):
            connection.close()

    async def _get(self, path: bytes) -> HttpAnswer:
        parts = [b"GET %s%s HTTP/1.1\r\n%s\r\n" % (self._path, path, self._rest)]
        try:
            async with asyncio.timeout(self._model.connect_timeout):
                try:
                    return await self._exchange(parts)
                except LostError:  # the server may have just closed an idle connection
                    return await self._exchange(parts, fresh=True)
        except TimeoutError:
            raise unavailable(f"no answer within {self._model.connect_timeout:g} s") from None

    async def _exchange(self, parts: Sequence[Buffer], *, fresh: bool = False) -> HttpAnswer:
        connection = (None if fresh else self._take_idle()) or await self._connect()
        answer = await connection.exchange(parts)
        if connection.usable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

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
            raise UnreachedError("the model is being unloaded")
        try:
            async with asyncio.timeout(self._model.connect_timeout):
                _, connection = await self._loop.create_connection(
                    lambda: RemoteHttpConnection(self._on_closed),
                    url.host,
                    url.port,
                    ssl=self._model.tls.context if url.is_encrypted else None,
                )
        except TimeoutError:
            raise UnreachedError(f"no connection within {self._model.connect_timeout:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise UnreachedError(f"its certificate is not accepted: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise UnreachedError(f"no encrypted connection: {error.reason or error}") from None
        except socket.gaierror:
            raise UnreachedError(f"no connection: no address is known for '{url.host}'") from None
        except OSError as error:
            raise UnreachedError(f"no connection: {os.strerror(error.errno) if error.errno else error}") from None
        self._open.add(connection)
        return connection

    def _on_closed(self, connection: RemoteHttpConnection, idle: bool) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if idle and not self._closed:
            self.on_broken()

    def _refuse(self, answer: HttpAnswer) -> None:
        """Raise UNAVAILABLE for a refusal by a proxy in front of the server."""
        if answer.status in _REFUSALS:
            raise unavailable(_REFUSALS[answer.status])
