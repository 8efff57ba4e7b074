"""A network in memory: listeners, and connections with delayed bytes that may arrive in several parts."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tests.simulation.loop import SimulatedLoop

#: Unread bytes that the kernels of both ends hold (bytes); the rest stays in the sender's buffer.
_KERNEL = 64 << 10
#: Maximum size of one read (bytes).
_READ = 256 << 10


class SimulatedListener:
    """The result of ``create_server``."""

    def __init__(self, network: SimulatedNetwork, address: tuple[str, int], factory: Callable[[], Any]) -> None:
        self._network = network
        self._address = address
        self.factory = factory
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def close(self) -> None:
        self._network.listeners.pop(self._address, None)

    def is_serving(self) -> bool:
        return self._address in self._network.listeners

    async def wait_closed(self) -> None:
        """Do nothing: ``close`` takes effect at once."""


class SimulatedNetwork:
    """All listeners; connection attempts to ``silent`` ports are never answered."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.listeners: dict[tuple[str, int], SimulatedListener] = {}
        self.silent: set[int] = set()
        self._last_port = 20_000

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> SimulatedListener:
        """Listen at an address; port 0 takes a free port of ``host``."""
        if not port:
            self._last_port += 1
            port = self._last_port
        if (host, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        listener = self.listeners[host, port] = SimulatedListener(self, (host, port), factory)
        return listener

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[Any, Any]:
        """Connect to a listener; raises ConnectionRefusedError if there is none."""
        arrived = self._loop.create_future()
        self._loop.later(self._loop.latency(0.0002), partial(self._loop.arrive, _set, arrived))
        await arrived
        if port in self.silent:
            await self._loop.create_future()  # the connection attempt is never answered
        return self.connected(factory, host, port)

    def connected(self, factory: Callable[[], Any], host: str, port: int) -> tuple[Any, Any]:
        """Connect at once; see :meth:`connect`."""
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        ours, theirs = SimulatedTransport(self._loop), SimulatedTransport(self._loop)
        ours.peer, theirs.peer = theirs, ours
        protocol = ours.protocol = factory()
        protocol.connection_made(ours)
        self._loop.later(self._loop.latency(0.0001), partial(self._loop.arrive, self._accept, listener, theirs))
        return ours, protocol

    def _accept(self, listener: SimulatedListener, transport: SimulatedTransport) -> None:
        if not listener.is_serving():
            transport.peer.reset()
            return
        transport.protocol = listener.factory()
        transport.protocol.connection_made(transport)
        if transport.reset_early:
            transport.reset()
        transport.read()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SimulatedTransport:
    """One end of a connection; like uvloop's, it has the interface of a transport but not the base class."""

    peer: SimulatedTransport

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.protocol: Any = None
        self._inbound: deque[bytes] = deque()
        self._ended = False  # the peer sends nothing more
        self._paused = False
        self._reading = False  # an event is scheduled
        self._closing = self._lost = False
        self._eof_sent = False
        self._unread = 0  # bytes that were sent and that the peer's protocol has not read
        self._high, self._low = _KERNEL, _KERNEL // 4
        self._full = False
        self._last_arrival = 0
        #: Whether the peer disconnected before the connection was accepted.
        self.reset_early = False

    # Sending

    def write(self, data: Any) -> None:
        if self._closing or self._lost or self._eof_sent or not len(data):
            return
        data = bytes(data)
        self._unread += len(data)
        if not self._full and self.get_write_buffer_size() > self._high:
            self._full = True
            self.protocol.pause_writing()
        for piece in self._pieces(data):
            self._send(partial(self.peer.receive, piece))

    def writelines(self, parts: Iterable[Any]) -> None:
        self.write(b"".join(bytes(part) for part in parts))

    def _pieces(self, data: bytes) -> list[bytes]:
        random = self._loop.random
        if len(data) > 1 and random.random() < 0.1:
            cut = random.randrange(1, len(data))
            return [data[:cut], data[cut:]]
        return [data]

    def _send(self, event: Callable[[], None]) -> None:
        """Schedule an event at the peer, after everything that was sent before."""
        now = self._loop.clock.now_ns
        when = max(now + int(self._loop.latency(0.0001) * 1e9), self._last_arrival + 1)
        self._last_arrival = when
        self._loop.later((when - now) / 1e9, event)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._eof_sent and not self._closing:
            self._eof_sent = True
            self._send(self.peer.receive_end)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _KERNEL if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return max(self._unread - _KERNEL, 0)

    def _was_read(self, count: int) -> None:
        self._unread -= count
        if self._full and not self._lost and self.get_write_buffer_size() <= self._low:
            self._full = False
            self.protocol.resume_writing()

    # Receiving

    def receive(self, data: bytes) -> None:
        """Handle bytes from the peer."""
        if not self._lost:
            self._inbound.append(data)
            self.read()

    def receive_end(self) -> None:
        """Handle the end of the peer's data."""
        self._ended = True
        self.read()

    def reset(self) -> None:
        """Handle a peer that disconnected without reading everything, or without ending its data."""
        if self.protocol is None:
            self.reset_early = True
        elif not self._lost:
            self._inbound.clear()
            self._lose(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def read(self) -> None:
        """Report the data that arrived at the next poll, unless reading is paused."""
        if (self._inbound or self._ended) and not self._reading and not self._paused and self.protocol is not None:
            self._reading = True
            self._loop.arrive(self._read)

    def _read(self) -> None:
        self._reading = False
        if self._paused or self._closing or self._lost:
            return
        if self._inbound:
            data = b"".join(self._inbound)
            self._inbound.clear()
            if len(data) > _READ:
                self._inbound.append(data[_READ:])
                data = data[:_READ]
            self.protocol.data_received(data)
            self._loop.later(self._loop.latency(0.0001), partial(self._loop.arrive, self.peer._was_read, len(data)))
            if not self._closing:
                self.read()
        elif self._ended:
            self._ended = False
            if not self.protocol.eof_received():
                self.close()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self.read()

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    # The end

    def close(self) -> None:
        if self._closing or self._lost:
            return
        self._closing = True
        if not self._eof_sent:
            self._send(self.peer.receive_end)
        self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if self._lost:
            return
        self._closing = True
        self._send(self.peer.reset)
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            if self.protocol is not None:
                self.protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 40_000) if name in ("peername", "sockname") else default

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol
