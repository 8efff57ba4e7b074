"""Bytes on a connection, of HTTP/1.1 and of HTTP/2 with gRPC: answered or ended, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Iterator
from typing import Any, Final

import hpack
import httptools

from conch.core.errors import ConchError
from conch.frontends.budget import ByteBudget
from conch.frontends.grpc.server import http2_limits
from conch.frontends.grpc.service import GrpcService
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.server import HttpConnection
from conch.frontends.limits import ClientLimits
from conch.frontends.offloading.offloader import Offloader
from conch.http2 import ExceededLimit, Http2Connection, frames
from conch.options.settings import Settings
from tests.fakes.transports import FakeTransport
from tests.fuzz.target import target
from tests.unit.frontends.grpc.conftest import models, text_request
from tests.unit.frontends.grpc.fake_core import FakeServer
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, STREAM_INFER, headers, message

#: Turns of the event loop that a connection gets for a piece of what was sent.
_TURNS: Final = 50
_LIMIT: Final = 4096


class _NoExceptions(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        assert record.exc_info is None, record.getMessage()


@contextlib.contextmanager
def _nothing_unforeseen() -> Iterator[None]:
    """Fail if an unexpected exception was logged, with its traceback."""
    logger, handler = logging.getLogger("conch"), _NoExceptions()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


async def _send(connection: asyncio.Protocol, transport: FakeTransport, data: bytes, piece: int) -> None:
    """Let the connection receive ``data`` as a real transport would, and give it turns to deal with it."""
    for at in range(0, len(data), piece):
        for _ in range(_TURNS):
            if transport.reading or transport.closing:
                break
            await asyncio.sleep(0)
        if transport.closing or not transport.reading:
            break
        connection.data_received(data[at : at + piece])
        await asyncio.sleep(0)
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _run(work: Any) -> None:
    unforeseen: list[dict[str, Any]] = []
    with _nothing_unforeseen(), asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: unforeseen.append(context))
        runner.run(work)
    assert not unforeseen, unforeseen


class _Echo:
    """An application that answers at once what it was sent."""

    def __init__(self) -> None:
        self.handled = 0
        self.keeps_names = False

    def handle(self, exchange: HttpExchange) -> None:
        self.handled += 1
        exchange.respond(200, [], exchange.body)

    def open(self, exchange: HttpExchange) -> int:
        return _LIMIT

    def refuse(self, exchange: HttpExchange, error: ConchError, status: int) -> None:
        self.handled += 1
        exchange.respond(status or 400, [], error.message.encode())

    def too_large(self, exchange: HttpExchange, size: int, limit: int) -> str:
        return "too large"


class _NullConnection:
    """Counts the answers in what was written; raises for what is no HTTP."""

    def __init__(self) -> None:
        self.count = 0

    def on_message_complete(self) -> None:
        self.count += 1


@target(
    seeds=[
        b"\x10GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n" * 2,
        b"\x40POST /p?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
        b"\x05POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n",
        b"\xffPOST /p HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
        b"\xffPOST /p HTTP/1.0\r\nContent-Encoding: gzip\r\nContent-Length: 9999999\r\n\r\n",
    ],
    tokens=[
        b"\r\n", b"\r\n\r\n", b"\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0", b"HTTP/2.0",
        b"Connection: keep-alive\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n",
        b"0\r\n",
        b"PUT ", b"OPTIONS * ", b"CONNECT a:1 ", b"GET ", b"ffffffffffffffff\r\n", b": ", b"\0",
        b"Host: a\r\nHost: b\r\n",
        b"Inference-Header-Content-Length: 1\r\n", b"Content-Encoding: deflate\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)  # fmt: skip
def http1_connection(data: bytes) -> None:
    """The first byte says in pieces of which size the others arrive."""
    piece = max(1, data[0]) if data else 1
    application, connections, budget = _Echo(), set[HttpConnection](), ByteBudget(1 << 20)
    transport = FakeTransport()

    async def talk() -> None:
        connection = HttpConnection(application, connections, ClientLimits(budget))
        connection.connection_made(transport)
        await _send(connection, transport, data[1:], piece)
        connection.connection_lost(None)
        await asyncio.sleep(0)

    _run(talk())
    assert not connections
    assert budget.used == 0
    answers = _NullConnection()
    if b"HEAD" not in data and b"CONNECT" not in data:
        httptools.HttpResponseParser(answers).feed_data(bytes(transport.written))
        # One for each request, and one for what could not be understood.
        assert answers.count <= application.handled + 2 + data.lower().count(b"100-continue")


def _frames(*parts: bytes, start: bytes = frames.PREFACE + frames.settings({})) -> bytes:
    return b"\x80" + start + b"".join(parts)


def _call(path: str, body: bytes, stream: int = 1, *more: tuple[str, str]) -> bytes:
    block = hpack.Encoder().encode(headers(path, *more))
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block) + frames.frame(
        frames.DATA, frames.END_STREAM, stream, body
    )


def _infer(model: str) -> bytes:
    return message(text_request(model, "x").SerializeToString())


@target(
    seeds=[
        _frames(_call(LIVE, message(b""))),
        _frames(_call(INFER, _infer("echo"), 1, ("grpc-timeout", "1S")), _call("/x", b"", 3)),
        _frames(_call(STREAM_INFER, _infer("echo") + _infer("hold_decoupled") + _infer("misbehave"))),
        _frames(_call(INFER, _infer("hold")), frames.rst_stream(1, frames.Http2ErrorCode.CANCEL)),
        _frames(frames.window_update(0, 5), frames.settings({4: 0, 5: 1 << 14}), _call(INFER, _infer("echo"), 5)),
    ],
    tokens=[
        frames.PREFACE, frames.settings({}), frames.settings({4: 2**31 - 1}), frames.settings({1: 0}),
        frames.window_update(0, 2**31 - 1), frames.window_update(1, 1), frames.frame(frames.PING, 0, 0, b"\0" * 8),
        frames.frame(frames.GOAWAY, 0, 0, b"\0" * 8), frames.frame(frames.CONTINUATION, 4, 1, b""),
        frames.frame(frames.HEADERS, 4, 1, b"\x80"), frames.frame(frames.PRIORITY, 0, 1, b"\0\0\0\1\0"),
        frames.frame(frames.DATA, 9, 1, b"\x05aaa"), _infer("echo"), message(b"\xff"), struct.pack("!I", 2**31),
    ],
)  # fmt: skip
def http2_connection(data: bytes) -> None:
    """The first byte says in pieces of which size the others arrive."""
    piece = max(1, data[0]) if data else 1
    transport, seen = FakeTransport(), _Seen()
    server, budget = FakeServer(Settings(), *models()), ByteBudget(1 << 20)

    async def talk() -> None:
        loop = asyncio.get_running_loop()
        limits = ClientLimits(budget)
        service = GrpcService(server, loop, Offloader(1 << 30, 30, budget), limits)  # type: ignore[arg-type]
        connection = Http2Connection(service, loop, seen, http2_limits(Settings(), limits))
        connection.connection_made(transport)
        await _send(connection, transport, data[1:], piece)
        session = connection.session
        connection.connection_lost(None)
        await asyncio.sleep(0)
        assert not session.streams

    _run(talk())
    assert seen.lost == seen.made == 1
    assert budget.used == 0
    for model in server.models.values():
        assert all(request.finished for request in model.received)


class _Seen:
    """Counts the connections that were made and lost."""

    def __init__(self) -> None:
        self.made = self.lost = 0

    def on_connection_made(self, connection: Http2Connection) -> None:
        self.made += 1

    def on_connection_lost(self, connection: Http2Connection) -> None:
        self.lost += 1

    def on_limit_exceeded(self, limit: ExceededLimit) -> None:
        pass
