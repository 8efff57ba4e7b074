"""HTTP/2 serves any application, without the gRPC front end and the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf

import hpack

from conch.core.tensors import Buffer
from conch.http2 import (
    ExceededLimit,
    Field,
    Http2Connection,
    Http2ErrorCode,
    Http2Limits,
    Http2Stream,
    PingLimits,
    StreamFault,
    encode_headers,
    frames,
)
from tests.fakes.transports import FakeTransport

GREETING = frames.PREFACE + frames.settings({})
STATUS = encode_headers([(b":status", b"200")])
TRAILERS = encode_headers([(b"end", b"yes")])


class Bytes:
    """Counts bytes without a limit."""

    def __init__(self) -> None:
        self.held = 0

    def take(self, size: int) -> bool:
        self.held += size
        return True

    def release(self, size: int) -> None:
        self.held -= size


class NoBudget:
    """Allows any time on the event loop."""

    def over(self) -> bool:
        return False

    def later(self, work: Callable[[], None]) -> None:
        raise AssertionError("the budget is never spent")


class EchoHandler:
    """Answers a request with its body."""

    awaited: int | None = 0

    def __init__(self, stream: Http2Stream) -> None:
        self.stream = stream
        self.body = b""
        self.stalled: list[str] = []
        self.reset = False

    def on_stalled(self, message: str) -> None:
        self.stalled.append(message)

    def on_data(self, chunk: Buffer) -> None:
        self.body += bytes(chunk)
        if self.stream.remote_ended:
            self.stream.respond(STATUS, [self.body], len(self.body), TRAILERS)

    def on_reset(self) -> None:
        self.reset = True

    def on_drained(self) -> None: ...


class EchoApplication:
    """Application and observer of one connection."""

    def __init__(self, **times: float) -> None:
        self.handlers: list[EchoHandler] = []
        self.exceeded: list[ExceededLimit] = []
        self.transport = FakeTransport()
        limits = Http2Limits(Bytes(), NoBudget(), PingLimits(0, 0, inf), min_rate=1, **times)
        self.connection = Http2Connection(self, asyncio.get_running_loop(), self, limits)
        self.connection.connection_made(self.transport)
        self.connection.data_received(GREETING)
        self.transport.written.clear()

    def parse(self, fields: Sequence[Field]) -> dict[bytes, bytes]:
        if (b"bad", b"yes") in fields:
            raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "bad")
        return dict(fields)

    def check_trailers(self, fields: Sequence[Field]) -> None: ...

    def open(self, stream: Http2Stream, head: dict[bytes, bytes]) -> EchoHandler:
        self.handlers.append(EchoHandler(stream))
        return self.handlers[-1]

    def on_connection_made(self, connection: Http2Connection) -> None: ...

    def on_connection_lost(self, connection: Http2Connection) -> None: ...

    def on_limit_exceeded(self, limit: ExceededLimit) -> None:
        self.exceeded.append(limit)


def request(stream: int, *fields: Field, body: bytes = b"", whole: bool = True) -> bytes:
    block = hpack.Encoder().encode([(b":path", b"/echo"), *fields])
    data = frames.frame(frames.DATA, frames.END_STREAM if whole else 0, stream, body)
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block) + data


async def test_an_application_answers_a_request_with_its_body() -> None:
    echo = EchoApplication()
    echo.connection.data_received(request(1, body=b"hello"))
    assert bytes(echo.transport.written) == (
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, STATUS)
        + frames.frame(frames.DATA, 0, 1, b"hello")
        + frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, TRAILERS)
    )
    assert not echo.connection.session.streams


async def test_a_head_that_the_application_refuses_resets_its_stream_only() -> None:
    echo = EchoApplication()
    echo.connection.data_received(request(1, (b"bad", b"yes")) + request(3, body=b"x"))
    assert echo.transport.written.startswith(frames.rst_stream(1, Http2ErrorCode.PROTOCOL_ERROR))
    assert [handler.body for handler in echo.handlers] == [b"x"]


async def test_a_body_that_stops_arriving_is_reported_to_its_handler_and_counted() -> None:
    echo = EchoApplication(body=10)
    echo.connection.data_received(request(1, body=b"hel", whole=False))
    echo.connection.sweep(100)
    echo.connection.sweep(110)
    assert echo.exceeded == []
    echo.connection.sweep(111)
    assert echo.exceeded == ["body"]
    assert len(echo.handlers[0].stalled) == 1


async def test_a_connection_that_fails_resets_its_requests() -> None:
    echo = EchoApplication()
    echo.connection.data_received(request(1, body=b"hel", whole=False))
    echo.connection.data_received(frames.frame(frames.PUSH_PROMISE, 0, 1, bytes(4)))
    assert echo.handlers[0].reset and echo.transport.closing
