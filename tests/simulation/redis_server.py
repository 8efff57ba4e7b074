"""A simulated Redis server, which responds, stalls, dies, or refuses writes."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from tests.simulation.addresses import REDIS
from tests.simulation.connection import ServerConnection
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import SimulatedNetwork

import_module("redis.asyncio")  # import before a program runs: importing reads the clock

_REFUSED = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
#: A missing value in versions 2 and 3 of the protocol.
_NIL2, _NIL3 = b"$-1\r\n", b"_\r\n"
#: conch reads this key to test whether Redis responds; no response is stored under it.
_NO_KEY = b"conch:"


class RedisServer:
    """Stores the values that clients set. ``misses`` counts the lookups of missing responses."""

    def __init__(self, loop: SimulatedLoop, network: SimulatedNetwork) -> None:
        self.loop = loop
        self.connections: set[ServerConnection] = set()
        self.misses = 0
        #: Whether it has responded to every command in time so far, even if with a refusal.
        self.reliable = True
        self._entries: dict[bytes, bytes] = {}
        self._refuses_writes = False
        #: The time until which it does not respond (ns).
        self.stalled_until = 0
        self._network = network
        self._up()

    def fail(self, fault: str, seconds: float) -> None:
        """Cause a fault for ``seconds``: ``die``, ``stall`` or ``refuse`` (writes)."""
        match fault:
            case "die":
                self.reliable = False
                self._network.listeners.pop(REDIS, None)
                self._entries.clear()
                for connection in list(self.connections):
                    connection.transport.abort()
                self.loop.later(seconds, self._up)
            case "stall":
                self.reliable = False
                self.stalled_until = max(self.stalled_until, self.loop.clock.now_ns + int(seconds * 1e9))
            case "refuse":
                self._refuses_writes = True
                self.loop.later(seconds, self._accept_writes)

    def heal(self) -> None:
        """End all faults."""
        self.stalled_until = 0
        self._accept_writes()
        self._up()

    def _up(self) -> None:
        if REDIS not in self._network.listeners:
            self._network.listen(lambda: _Connection(self), *REDIS)

    def _accept_writes(self) -> None:
        self._refuses_writes = False

    def delay(self) -> float:
        """Return the time until the next response (s)."""
        return self.loop.latency(0.0002) + max(self.stalled_until - self.loop.clock.now_ns, 0) / 1e9

    def answer(self, command: list[bytes]) -> bytes | None:
        """Return the response to a command; None for a missing value."""
        match command[0].upper(), command[1:]:
            case b"GET", [key]:
                data = self._entries.get(key)
                self.misses += data is None and key != _NO_KEY
                return None if data is None else b"$%d\r\n%s\r\n" % (len(data), data)
            case b"SET", [key, data, *_]:
                if self._refuses_writes:
                    return _REFUSED
                self._entries[key] = data
                return b"+OK\r\n"
            case b"HELLO", _:
                return b"%1\r\n$5\r\nproto\r\n:3\r\n"
            case b"PING", _:
                return b"+PONG\r\n"
            case ((b"CLIENT" | b"SELECT"), _):
                return b"+OK\r\n"
            case name, _:
                return b"-ERR unknown command '%s'\r\n" % name


class _Connection(ServerConnection):
    def __init__(self, server: RedisServer) -> None:
        super().__init__(server.connections)
        self._server = server
        self._buffer = b""
        self._last = 0
        self._nil = _NIL2

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (command := self._command()) is not None:
            self._respond(command)

    def _respond(self, command: list[bytes]) -> None:
        """Respond after the responses to earlier commands."""
        loop = self._server.loop
        now = loop.clock.now_ns
        self._last = max(now + int(self._server.delay() * 1e9), self._last + 1)
        loop.later((self._last - now) / 1e9, partial(loop.arrive, self._answer, command))

    def _answer(self, command: list[bytes]) -> None:
        if command[0].upper() == b"HELLO":
            self._nil = _NIL3
        answer = self._server.answer(command)
        self.transport.write(self._nil if answer is None else answer)

    def _command(self) -> list[bytes] | None:
        """Return the next complete command, an array of strings."""
        head, end, rest = self._buffer.partition(b"\r\n")
        if not end:
            return None
        words = []
        for _ in range(int(head[1:])):
            size, end, rest = rest.partition(b"\r\n")
            length = int(size[1:] or 0)
            if not end or len(rest) < length + 2:
                return None
            words.append(rest[:length])
            rest = rest[length + 2 :]
        self._buffer = rest
        return words
