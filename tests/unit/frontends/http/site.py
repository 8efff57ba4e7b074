"""An application in front of which connections are tested, and a client that talks to it over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from conch.core.errors import ConchError
from conch.frontends.budget import ByteBudget
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.server import HttpListener
from conch.frontends.limits import ClientLimits

LIMIT = 1000


class WrittenConnection:
    """The connection of an exchange, which keeps what is written."""

    def __init__(self) -> None:
        self.transport = self
        self.budget = ByteBudget(1 << 30)
        self.written = b""
        self.ended = 0
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.written += b"".join(parts)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True

    def on_exchange_ended(self, exchange: HttpExchange) -> None:
        self.ended += 1


class Client:
    """A raw client; reads one response at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, text: bytes) -> None:
        self.writer.write(text)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = b""
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        return await self.reader.read() == b""


class Site:
    """The application under test: ``exchanges`` collects what arrived; ``answer`` may answer at once."""

    def __init__(self) -> None:
        self.exchanges: list[HttpExchange] = []
        self.keeps_names = False
        self.opened = 0
        self.urgent = False
        self.limit = LIMIT
        self.refuses: str | None = None
        self.arrived = asyncio.Event()
        self.answer: Callable[[HttpExchange], None] | None = lambda exchange: exchange.respond(200, [], exchange.body)

    def handle(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)
        self.arrived.set()
        if self.answer is not None:
            self.answer(exchange)

    def open(self, exchange: HttpExchange) -> int:
        self.opened += 1
        exchange.urgent = self.urgent
        if self.refuses is not None:
            exchange.refusal = (ConchError(self.refuses), 403)
        return self.limit

    def refuse(self, exchange: HttpExchange, error: ConchError, status: int) -> None:
        exchange.respond(status or 400, [], error.message.encode())

    def too_large(self, exchange: HttpExchange, size: int, limit: int) -> str:
        return "too large"

    async def next(self) -> HttpExchange:
        await self.arrived.wait()
        self.arrived.clear()
        return self.exchanges[-1]


def post(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /p?q=1 HTTP/1.1", b"Content-Length: %d" % len(body), *headers, b"", b""]) + body


async def turns(number: int = 20) -> None:
    """Let the loop turn; what is on its way through a socket of this machine arrives."""
    for _ in range(number):
        await asyncio.sleep(0.001)


async def swept(listener: HttpListener, seconds: float) -> None:
    await turns()
    listener.sweep(monotonic() + seconds)


def closed(limits: ClientLimits) -> dict[str, float]:
    """How many connections were closed, by reason."""
    samples = dict(limits.counts.families())
    (closed,) = (numbers for metric, numbers in samples.items() if metric.name == "conch_closed_connections")
    return {sample.labels.split('"')[3]: sample.value for sample in closed}
