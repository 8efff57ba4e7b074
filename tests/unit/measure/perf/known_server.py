"""A server whose behaviour is known: so many requests at a time, each for so long, some with errors.

It speaks just enough of HTTP, in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

METADATA: Final = {
    "name": "known",
    "versions": ["1"],
    "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 4]}],
}
CONFIG: Final = {"name": "known", "max_batch_size": 8}


@dataclass
class KnownServer:
    """``slots`` requests run at a time, for ``service`` seconds each; every ``fails``-th gets an error at once.

    When ``freezes_after`` requests have come, no client is served for a second, between ``frozen_from`` and
    ``frozen_until`` (s, monotonic). After ``dies_after`` answers it is gone. Where these are 0 that never happens.
    ``chunked`` sends bodies in pieces; ``answer`` is that of an inference; ``about``, ``metadata`` and ``config`` are
    what it says of itself and of its model. ``bodies`` are those that came; ``reached`` is set after ``tells_after``
    answers. ``served`` are the moments at which requests came and at which they were done, in that order.
    """

    service: float = 0.0
    slots: int = 1_000
    fails: int = 0
    freezes_after: int = 0
    dies_after: int = 0
    tells_after: int = 0
    chunked: bool = False
    answer: bytes = b'{"outputs":[]}'
    about: Mapping[str, Any] = field(default_factory=lambda: {"name": "known"})
    metadata: Mapping[str, Any] = field(default_factory=lambda: METADATA)
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    port: int = 0
    answered: int = 0

    def __post_init__(self) -> None:
        self.bodies: list[bytes] = []
        self.frozen_from = self.frozen_until = 0.0
        self.served: list[tuple[float, float]] = []
        self._busy = asyncio.Semaphore(self.slots)
        self._writers: set[asyncio.StreamWriter] = set()
        self.listener: asyncio.Server | None = None
        self.reached = threading.Event()

    def die(self) -> None:
        """Listen no more, and end all connections; called in the server's thread."""
        if self.listener is not None:
            self.listener.close()
        self._abort()

    def hang_up(self) -> None:
        """End all connections; called in any thread."""
        assert self.listener is not None
        self.listener.get_loop().call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *lines = head.decode().split("\r\n")
                sizes = [int(one.partition(":")[2]) for one in lines if one.lower().startswith("content-length:")]
                body = await reader.readexactly(sizes[0]) if sizes else b""
                status, answer = await self._answer(line.split()[1], body)
                if self.chunked:
                    writer.write(b"HTTP/1.1 %b\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
                    for part in (answer[:5], answer[5:], b""):
                        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                else:
                    writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(answer)) + answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: bytes) -> tuple[bytes, bytes]:
        if not path.endswith(("/infer", "/generate", "/generate_stream", "/completions", "/embeddings")):
            known = {"/v2": self.about, "/v2/models/known": self.metadata, "/v2/models/known/config": self.config}
            found = known.get(path)
            return (b"404 Not Found", b'{"error":"not here"}') if found is None else (b"200 OK", _json(found))
        self.bodies.append(body)
        self.answered += 1
        if self.answered == self.tells_after:
            self.reached.set()
        if self.fails and self.answered % self.fails == 0:
            return b"500 Internal Server Error", b'{"error":"it is the turn of an error"}'
        came = monotonic()
        if self.answered == self.freezes_after:
            self.frozen_from, self.frozen_until = came, came + 1.0
        async with self._busy:
            began = monotonic()
            if self.frozen_from <= began < self.frozen_until:
                await asyncio.sleep(self.frozen_until - began)
            await asyncio.sleep(self.service)
            self.served.append((came, monotonic()))
        if self.dies_after and len(self.served) >= self.dies_after:
            self.die()
        return b"200 OK", self.answer

    def service_between(self, start: float, end: float) -> float:
        """How long each request that was done between two moments kept a slot from others, on average (s).

        That is from when it came, or from when the slot became free, which is a little before it noticed.
        """
        ends = [done for _, done in self.served]
        durations = [
            done - max(came, ends[number - self.slots] if number >= self.slots else 0.0)
            for number, (came, done) in enumerate(self.served)
            if start < done <= end
        ]
        return sum(durations) / len(durations)


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


@contextmanager
def running(server: KnownServer, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[KnownServer]:
    """The server on a free port of this machine."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(server.serve, host, 0, ssl=tls)

    server.listener = listener = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    server.port = listener.sockets[0].getsockname()[1]

    async def stop() -> None:
        listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
