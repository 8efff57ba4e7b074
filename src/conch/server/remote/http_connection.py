"""A kept-alive HTTP connection to another server, for one exchange at a time.  Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, cast

import httptools

from conch.errors import unavailable
from conch.server.remote.transport import LostError
from conch.tensors import Buffer


class HttpAnswer(NamedTuple):
    """An answer that has come whole; ``header_length`` is how many bytes of the ``body`` are JSON, None for all."""

    status: int
    body: bytes
    header_length: int | None


class RemoteHttpConnection(asyncio.Protocol):
    """``on_closed`` is called once, when it has ended, with whether the other end did that while it was idle."""

    def __init__(self, on_closed: Callable[[RemoteHttpConnection, bool], None]) -> None:
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._ended_here = False
        #: When the last answer was complete (s, monotonic).
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
        """Send a request and wait for its answer.  Raises :class:`LostError` when the connection breaks first.

        Cancelling closes the connection, by which the server knows that nobody waits any more.
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
        """End the connection at once."""
        self._ended_here = True
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        if self._answer is None:
            self.close()  # nobody has asked
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
        if status < 200:  # an interim response, such as 100 Continue: the answer follows
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
        """Expect another answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self._header_length = None

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
