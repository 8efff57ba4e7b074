"""Measures the highest request rate of the senders, against a server that responds at once.

The measurement runs on this machine, just before the level is measured, with the same payloads and the same number of
callers. The result is a lower bound where the senders and this server share the cores.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Final

import hpack

from conch.core.errors import internal
from conch.http2 import frames
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.generator import Generators, PipedProcesses, Traffic
from conch.measure.perf.senders.records import Outcome

# The server implements HTTP/1.1 with one request at a time per connection, and unary gRPC calls over HTTP/2. It runs in
# separate processes, which end when the pipe to their parent is closed.


_TIMEOUT: Final = 30.0
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HTTP_ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class NullServer:
    """Listens with ``count`` processes on one ``port`` of this machine, over HTTP or gRPC."""

    def __init__(self, count: int, *, grpc: bool) -> None:
        self.port = 0
        self._processes = PipedProcesses()
        for _ in range(count):
            pipe = self._processes.start(_main, self.port, grpc)
            if not pipe.poll(_TIMEOUT):
                raise internal(f"a process that imitates a server has not started within {_TIMEOUT:g} s")
            self.port = pipe.recv()

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _main(pipe: Connection, port: int, grpc: bool) -> None:
    import uvloop

    loop = uvloop.new_event_loop()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    loop.run_until_complete(loop.create_server(_NullGrpc if grpc else _NullHttp, sock=listener))
    pipe.send(listener.getsockname()[1])
    loop.add_reader(pipe.fileno(), loop.stop)
    loop.run_forever()
    os._exit(0)


class _NullConnection(asyncio.Protocol):
    """A connection to the null server."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]


class _NullHttp(_NullConnection):
    """Responds when the connection has received the number of bytes that the request's head declares."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
        else:
            head = self._head + data if self._head else data
            end = head.find(b"\r\n\r\n")
            if end < 0:
                self._head = head
                return
            self._head = b""
            length = _LENGTH.search(head, 0, end)
            self._left = end + 4 + int(length[1] if length else 0) - len(head)
        if self._left <= 0:
            self._left = 0
            self.transport.write(_HTTP_ANSWER)


class _NullGrpc(_NullConnection):
    """Responds with an empty message to every stream that the client has ended."""

    def __init__(self) -> None:
        encoder = hpack.Encoder()
        # Without the dynamic header table of the connection, so that every response has the same bytes.
        self._head, self._trailers = (
            encoder.encode([hpack.NeverIndexedHeaderTuple(name, value) for name, value in fields])
            for fields in ([(":status", "200"), ("content-type", "application/grpc")], [("grpc-status", "0")])
        )
        self._rest = b""
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        room = frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
        self.transport.write(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}) + room)
        self._greeting = len(frames.PREFACE)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, out = 0, []
        if self._greeting:
            if len(data) < self._greeting:
                self._rest = data
                return
            at, self._greeting = self._greeting, 0
        while len(data) - at >= 9:
            word, flags, stream = frames.FRAME.unpack_from(data, at)
            kind, stop = word & 0xFF, at + 9 + (word >> 8)
            if stop > len(data):
                break
            if kind == frames.DATA:
                self._received += word >> 8
                if flags & frames.END_STREAM:
                    out.append(self._response(stream))
            elif kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
                payload = data[at + 9 : stop] if kind == frames.PING else b""
                out.append(frames.frame(kind, frames.ACK, 0, payload))
            at = stop
        self._rest = data[at:]
        if self._received > frames.MAX_WINDOW // 2:
            out.append(frames.window_update(0, self._received))
            self._received = 0
        if out:
            self.transport.write(b"".join(out))

    def _response(self, stream: int) -> bytes:
        head, trailers = self._head, self._trailers
        return b"".join((
            frames.FRAME.pack(len(head) << 8 | frames.HEADERS, frames.END_HEADERS, stream), head,
            frames.FRAME.pack(5 << 8 | frames.DATA, 0, stream), bytes(5),
            frames.FRAME.pack(len(trailers) << 8 | frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream),
            trailers,
        ))  # fmt: skip


_WARM_UP: Final = 0.1
_SECONDS: Final = 0.3


class SenderLimit:
    """Measures the limit once for each number of callers; starts its processes at the first measurement."""

    def __init__(self, traffic: Traffic, processes: int) -> None:
        self._traffic = traffic
        self._count = processes
        self._measured: dict[int, float] = {}
        self._server: NullServer | None = None
        self._senders: Generators | None = None

    def at(self, concurrency: int) -> float | None:
        """Return the requests per second with this many callers; None over TLS and for streams (not supported)."""
        if self._traffic.address.encrypted or self._traffic.read is not None or self._traffic.streams:
            return None
        if concurrency not in self._measured:
            self._measured[concurrency] = self._measure(concurrency)
        return self._measured[concurrency]

    def close(self) -> None:
        """End the processes."""
        for process in (self._senders, self._server):
            if process is not None:
                process.close()

    def _measure(self, concurrency: int) -> float:
        senders = self._started()
        senders.run_closed(concurrency)
        sleep(_WARM_UP)
        senders.collect()
        start = monotonic()
        sleep(_SECONDS)
        records = senders.collect().records
        # The validation may reject an empty response, which is no less work for the sender.
        rate = int((records["outcome"] != Outcome.CONNECTION_LOST).sum()) / (monotonic() - start)
        senders.pause()
        return rate

    def _started(self) -> Generators:
        if self._senders is None:
            self._server = NullServer(self._count, grpc=self._traffic.method is not None)
            address = Address("127.0.0.1", self._server.port)
            self._senders = Generators(replace(self._traffic, address=address, judge=None), self._count)
        return self._senders
