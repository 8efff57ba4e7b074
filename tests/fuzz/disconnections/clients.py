"""The clients: each sends a request and leaves at a random moment, in a random manner."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.fuzz.disconnections.repository import RandomRequests

#: How long a client waits for a response that it wants to have (s).
PATIENCE: Final = 150.0
#: A reset instead of an orderly end, as of a client that was killed.
_RESET: Final = struct.pack("ii", 1, 0)
_RESPONSE_ID: Final = re.compile(rb'"id":"(resp_[^"]+)"')


class Clients:
    """Runs clients of both protocols until :meth:`stop`; ``sent`` and ``statuses`` count requests and responses."""

    def __init__(self, http: str, grpc_address: str, requests: RandomRequests, chance: random.Random) -> None:
        self._http = http.split(":")
        self._grpc = grpc_address
        self._requests = requests
        self._chance = chance
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self.sent: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.hung: list[str] = []

    def start(self, count: int) -> None:
        for _ in range(count):
            self._tasks.append(asyncio.create_task(self._run_http()))
            self._tasks.append(asyncio.create_task(self._run_grpc()))

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    # HTTP

    async def _run_http(self) -> None:
        leaves = (self._stay, self._leave_early, self._leave_later, self._leave_while_reading, self._close_half,
                  self._stall, self._pipeline)  # fmt: skip
        while not self._stopped:
            reader, writer = await asyncio.open_connection(self._http[0], int(self._http[1]), limit=1 << 24)
            request = self._requests.http()
            self.sent[request.path] += 1
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._chance.choice(leaves)(reader, writer, request.encode())
            except TimeoutError:
                self.hung.append(f"{request.method} {request.path} {request.body[:300]!r}")
            except (OSError, asyncio.IncompleteReadError):
                pass
            if self._chance.random() < 0.3:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            writer.close()

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.choice((0, 0.001, 0.005, 0.02, 0.1, 0.4)) * self._chance.random())

    async def _stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await self._read(reader)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read a response; a stream of the console does not end."""
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        self.statuses[head.split(b" ", 2)[1].decode()] += 1
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        if length is not None:
            body = await reader.readexactly(int(length[1]))
        elif b"no-store" in head:
            body = await reader.read(100)
        else:
            body = await reader.readuntil(b"\r\n0\r\n\r\n")
        if found := _RESPONSE_ID.search(body):
            self._requests.ids = [*self._requests.ids[-20:], found[1].decode()]

    async def _leave_early(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data[: self._chance.randrange(len(data))])
        await self._pause()

    async def _leave_later(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        await self._pause()

    async def _leave_while_reading(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes
    ) -> None:
        writer.write(data)
        await reader.read(self._chance.choice((1, 100, 1000)))
        await self._pause()

    async def _close_half(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        if self._chance.random() < 0.5:
            await self._pause()
        writer.write_eof()
        await reader.read()

    async def _stall(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send in two parts, then leave the response unread for a while."""
        middle = self._chance.randrange(len(data))
        writer.write(data[:middle])
        await self._pause()
        writer.write(data[middle:])
        writer.transport.pause_reading()
        await asyncio.sleep(0.3)

    async def _pipeline(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        others = [self._requests.http().encode() for _ in range(2)]
        writer.write(data + b"".join(others))
        if self._chance.random() < 0.5:
            await self._read(reader)
        await self._pause()

    # gRPC

    async def _run_grpc(self) -> None:
        while not self._stopped:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
            channel = grpc.aio.insecure_channel(self._grpc, options)
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            try:
                async with asyncio.timeout(PATIENCE):
                    calls = [self._call(stub) for _ in range(self._chance.randint(1, 4))]
                    await self._pause()
                    await asyncio.gather(*(self._end(call) for call in calls))
            except TimeoutError:
                self.hung.append("a gRPC call")
            except grpc.aio.UsageError:
                pass
            await channel.close()

    def _call(self, stub: Any) -> Any:
        timeout = self._chance.choice((None, None, 0.01, 0.1))
        metadata = (("triton_grpc_error", "true"),) if self._chance.random() < 0.3 else ()
        compression = self._chance.choice((None, None, grpc.Compression.Gzip))
        if self._chance.random() < 0.5:
            request = self._requests.unary()
            return stub.ModelInfer(request, timeout=timeout, metadata=metadata, compression=compression)
        requests = [self._requests.streamed() for _ in range(self._chance.randint(1, 4))]
        return stub.ModelStreamInfer(
            self._messages(requests), timeout=timeout, metadata=metadata, compression=compression
        )

    async def _messages(self, requests: list[pb.ModelInferRequest]) -> AsyncIterator[pb.ModelInferRequest]:
        for request in requests:
            yield request
            await self._pause()

    async def _end(self, call: Any) -> None:
        """Cancel a call, read a part of it, or all."""
        kind = self._chance.choice(("cancel", "first", "all", "all", "leave"))
        if kind == "leave":
            return
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, StopAsyncIteration):
            if kind != "cancel" and isinstance(call, grpc.aio.UnaryUnaryCall):
                await call
            elif kind == "all":
                async for _ in call:
                    pass
            elif kind == "first":
                await call.read()
        call.cancel()
        self.statuses[str(await call.code())] += 1
