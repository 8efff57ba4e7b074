"""The load generator: a process (``python -m benchmarks.generation.client``) with its task as JSON on its input.

Requests are encoded before the clock starts, and responses are decoded after it has stopped. Every request uses a new
connection, because some servers do not keep connections open.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any, cast

from benchmarks.generation.answer import Answer, Record, read
from benchmarks.generation.dialects import DIALECTS, Conch, Dialect
from benchmarks.generation.trace import Ask, Load


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of requests: ``dialect`` is a key of ``DIALECTS``."""

    address: str
    dialect: str
    model: str

    def speaks(self, *, counted: bool = False) -> Dialect:
        kind = DIALECTS[self.dialect]
        return Conch(self.model, counted=counted) if kind is Conch else kind(self.model)


@dataclass(slots=True)
class Sent:
    """An in-flight request."""

    ask: Ask
    due: int
    arrival: bool
    answer: Answer


class Exchange(asyncio.Protocol):
    """One request and its response on a connection."""

    def __init__(self, request: bytes, response: Answer) -> None:
        self.request, self.answer = request, response
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.answer.add(data, perf_counter_ns())
        if self.answer.complete:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Client:
    """Sends one load to one server."""

    def __init__(self, target: Target, load: Load, *, counted: bool) -> None:
        self.dialect = target.speaks(counted=counted)
        self.load = load
        host, port = target.address.split(":")
        self.host, self.port = host, int(port)
        requests = [(ask, self.dialect.request(target.address, ask)) for ask in load.asks]
        self.asks: Iterator[tuple[Ask, bytes]] = iter(requests)
        self.arrivals = [(at, ask, self.dialect.request(target.address, ask)) for at, ask in load.arrivals]
        self.sent: list[Sent] = []
        self.begin = 0

    async def run(self) -> None:
        """Send all requests and wait for the responses."""
        self.begin = perf_counter_ns()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.connections):
                group.create_task(self._closed())
            group.create_task(self._open(group))

    async def _closed(self) -> None:
        until = self.begin + self.load.seconds * 1e9
        completed = 0
        while completed < self.load.least or perf_counter_ns() < until:
            ask, request = next(self.asks, (None, b""))
            if ask is None:
                return
            await self._send(ask, request, perf_counter_ns(), arrival=False)
            completed += 1

    async def _open(self, group: asyncio.TaskGroup) -> None:
        for at, ask, request in self.arrivals:
            due = self.begin + int(at * 1e9)
            await asyncio.sleep(max(0.0, (due - perf_counter_ns()) / 1e9))
            group.create_task(self._send(ask, request, due, arrival=True))

    async def _send(self, ask: Ask, request: bytes, due: int, *, arrival: bool) -> None:
        response = Answer(self.dialect.streams)
        self.sent.append(Sent(ask, due, arrival, response))
        loop = asyncio.get_running_loop()
        _, exchange = await loop.create_connection(lambda: Exchange(request, response), self.host, self.port)
        await exchange.done
        if failure := response.failure():
            raise RuntimeError(failure)

    def records(self) -> list[Record]:
        """Return the records of all requests. Raises RuntimeError if a response is an error."""
        return [
            read(request.answer, self.dialect, due=request.due, tokens=request.ask.tokens, arrival=request.arrival)
            for request in self.sent
        ]


def drive(target: Target, load: Load, *, counted: bool = False, timeout: float = 900) -> list[Record]:
    """Send a load to ``target`` from a separate process. Raises RuntimeError with the first wrong response."""
    task = {"target": asdict(target), "load": load.document(), "counted": counted}
    command = [sys.executable, "-m", "benchmarks.generation.client"]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{target.dialect}: {done.stderr.strip()[-800:]}")
    return [Record(**record) for record in json.loads(done.stdout)]


def main() -> None:
    import uvloop

    task: dict[str, Any] = json.load(sys.stdin)
    client = Client(Target(**task["target"]), Load.read(task["load"]), counted=task["counted"])
    try:
        uvloop.run(client.run())
        records = client.records()
    except ExceptionGroup as errors:
        raise SystemExit(str(errors.exceptions[0])) from None
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    json.dump([asdict(record) for record in records], sys.stdout)


if __name__ == "__main__":
    main()
