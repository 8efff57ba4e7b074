"""A server whose behaviour is known: so many requests at a time, each for so long, some with errors.

It speaks just enough of HTTP, in a thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Final

METADATA: Final = {
    "name": "known",
    "versions": ["1"],
    "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 4]}],
}
CONFIG: Final = {"name": "known", "max_batch_size": 8}


@dataclass
class KnownServer:
    """``slots`` requests run at a time, for ``service`` seconds each; every ``fails``-th gets an error (0: none).

    ``chunked`` sends bodies in pieces; ``answer`` is that of an inference.  Nobody is served from ``frozen_from`` to
    ``frozen_until`` (s, monotonic).  After ``dies_after`` answers (0: never) it is gone.  ``bodies`` are those that
    came; ``reached`` is set after ``tells_after`` answers.
    """

    service: float = 0.0
    slots: int = 1_000
    fails: int = 0
    frozen_from: float = 0.0
    frozen_until: float = 0.0
    dies_after: int = 0
    tells_after: int = 0
    chunked: bool = False
    answer: bytes = b'{"outputs":[]}'
    port: int = 0
    answered: int = 0

    def __post_init__(self) -> None:
        self.bodies: list[bytes] = []
        self._busy = asyncio.Semaphore(self.slots)
        self._writers: set[asyncio.StreamWriter] = set()
        self.listener: asyncio.Server | None = None
        self.reached = threading.Event()

    def die(self) -> None:
        """Listen no more, and end all connections."""
        if self.listener is not None:
            self.listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End all connections."""
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
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: bytes) -> tuple[bytes, bytes]:
        if not path.endswith(("/infer", "/generate", "/generate_stream")):
            found = {"/v2": {"name": "known"}, "/v2/models/known": METADATA, "/v2/models/known/config": CONFIG}.get(
                path
            )
            return (b"404 Not Found", b'{"error":"not here"}') if found is None else (b"200 OK", _json(found))
        self.bodies.append(body)
        async with self._busy:
            now = monotonic()
            if self.frozen_from <= now < self.frozen_until:
                await asyncio.sleep(self.frozen_until - now)
            await asyncio.sleep(self.service)
        self.answered += 1
        if self.answered == self.dies_after:
            self.die()
        if self.answered == self.tells_after:
            self.reached.set()
        if self.fails and self.answered % self.fails == 0:
            return b"500 Internal Server Error", b'{"error":"it is the turn of an error"}'
        return b"200 OK", self.answer


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

    server.listener = listener = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
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
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
