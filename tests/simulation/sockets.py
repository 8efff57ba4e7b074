"""Sockets in memory: non-blocking ones between the server's event loop and workers, and blocking ones of threads."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import SimulatedNetwork
from tests.simulation.threads import SimulatedEvent, block

#: The size of the kernel's buffer (bytes), after which a socket is full.
_CAPACITY = 208 << 10


class SimulatedSocket:
    """The server's end; sent data arrives at ``on_bytes`` in order, after a delay that the loop draws."""

    def __init__(self, loop: SimulatedLoop, on_bytes: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        self._loop = loop
        self._on_bytes = on_bytes
        self._on_closed = on_closed
        self._inbound: deque[bytes] = deque()
        self._ended = False
        self._closed = False
        self._unread = 0
        self._last_sent = self._last_arrival = 0
        self._fd = loop.open(self)

    # Calls of the other end

    def attach(self, on_bytes: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        """Attach another process to the other end."""
        self._on_bytes, self._on_closed = on_bytes, on_closed
        if self._closed:
            self._loop.later(0, on_closed)

    def deliver_packet(self, data: bytes) -> None:
        """Deliver ``data`` as one packet."""
        self._last_arrival = self._in_order(self._last_arrival, partial(self._inbound.append, data))

    def deliver(self, data: bytes) -> None:
        """Deliver ``data``, perhaps in two parts."""
        random = self._loop.random
        if len(data) > 1 and random.random() < 0.05:
            cut = random.randrange(1, len(data))
            pieces = [data[:cut], data[cut:]]
        else:
            pieces = [data]
        for piece in pieces:
            self._last_arrival = self._in_order(self._last_arrival, partial(self._inbound.append, piece))

    def hang_up(self) -> None:
        """Deliver the end of the connection, after everything that was sent."""
        self._last_arrival = self._in_order(self._last_arrival, self._end)

    def _end(self) -> None:
        self._ended = True

    def _in_order(self, last: int, event: Callable[[], object]) -> int:
        """Schedule an event after ``last`` (ns); returns its time."""
        now = self._loop.clock.now_ns
        when = max(now + int(self._loop.latency(0.0001) * 1e9), last + 1)
        self._loop.later((when - now) / 1e9, event)
        return when

    # Calls of the loop

    @property
    def readable(self) -> bool:
        return bool(self._inbound) or self._ended

    @property
    def writable(self) -> bool:
        return self._unread < _CAPACITY

    # Calls of conch

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Any], ancillary: Sequence[Any] = ()) -> int:
        if self._closed or self._ended:
            raise BrokenPipeError
        room = _CAPACITY - self._unread
        if room <= 0:
            raise BlockingIOError
        data = b"".join(bytes(buffer) for buffer in buffers)[:room]
        self._unread += len(data)
        self._last_sent = self._in_order(self._last_sent, lambda: self._read_by_peer(data))
        return len(data)

    def _read_by_peer(self, data: bytes) -> None:
        self._unread -= len(data)
        if not self._closed:
            self._on_bytes(data)

    def recvmsg_into(self, buffers: Sequence[Any], size: int, flags: int = 0) -> tuple[int, list[Any], int, None]:
        if not self._inbound:
            if self._ended:
                return 0, [], 0, None
            raise BlockingIOError
        (buffer,) = buffers
        data = self._inbound.popleft()
        taken = min(len(data), len(buffer))
        buffer[:taken] = data[:taken]
        if taken < len(data):
            self._inbound.appendleft(data[taken:])
        return taken, [], 0, None

    def recv(self, size: int) -> bytes:
        """Receive a packet."""
        if not self._inbound and not self._ended:
            raise BlockingIOError
        return self._inbound.popleft() if self._inbound else b""

    def shutdown(self, how: int) -> None:
        self._ended = True
        self._loop.later(0, self._on_closed)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.later(0, self._on_closed)


class BlockingSocket(asyncio.Protocol):
    """A connected socket of a simulated thread, with the methods that conch's client uses."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._timeout: float | None = None
        self._data = bytearray()
        self._arrived = SimulatedEvent(loop)
        self._ended = False
        self._error: Exception | None = None
        self._closed = False

    def break_off(self) -> None:
        """Break the connection."""
        self._transport.abort()
        self.connection_lost(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    # Called by the transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._arrived.set()

    def eof_received(self) -> bool:
        self._ended = True
        self._arrived.set()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._error = self._error or error
        self.eof_received()

    # Called by the thread

    def setsockopt(self, *ignored: object) -> None:
        """Do nothing: bytes are always sent at once."""

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        self._transport.write(data)

    @property
    def readable(self) -> bool:
        return bool(self._data) or self._ended

    def recv(self, size: int) -> bytes:
        if not self.readable:
            self._arrived = SimulatedEvent(self._loop)
            self._loop.busy_threads -= 1
            arrived = self._arrived.wait(self._timeout)
            self._loop.busy_threads += 1
            if not arrived:
                raise TimeoutError("timed out")
        if not self._data and self._error is not None:
            raise self._error
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken

    def shutdown(self, how: int) -> None:
        self._transport.close()
        self.eof_received()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._transport.close()


class BlockingSockets:
    """Replaces ``socket`` and ``select`` for threads; ``opened`` are the sockets created."""

    POLLIN = 1

    def __init__(self, loop: SimulatedLoop, network: SimulatedNetwork) -> None:
        self.opened: list[BlockingSocket] = []
        self._loop = loop
        self._network = network

    def getaddrinfo(self, host: str, port: int, **options: Any) -> list[Any]:
        return [(None, (host, port))]

    def create_connection(self, address: tuple[str, int], timeout: float | None = None) -> BlockingSocket:
        seconds = self._loop.latency(0.0002)
        block(seconds if timeout is None else min(seconds, timeout))
        if timeout is not None and seconds > timeout:
            raise TimeoutError("timed out")
        connection = BlockingSocket(self._loop)
        self._network.connected(lambda: connection, *address)
        self.opened.append(connection)
        return connection

    def poll(self) -> Any:
        registered: list[BlockingSocket] = []
        return SimpleNamespace(
            register=lambda connection, events: registered.append(connection),
            poll=lambda seconds: [connection for connection in registered if connection.readable],
        )
