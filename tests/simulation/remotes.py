"""Simulated servers that run remote models; they respond, die, drop connections, or refuse requests."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from conch.client.transport import LostError, UnreachableError
from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError, unavailable
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.server.execution.remote.http_calls import RemoteModel
from tests.simulation.connection import ServerConnection
from tests.simulation.loop import SimulatedLoop
from tests.simulation.models import SimulatedRepository
from tests.simulation.network import SimulatedNetwork

#: A server forgets a sequence after this time without a request (s), the default of
#: ``max_sequence_idle_microseconds``.
SEQUENCE_IDLE_SECONDS = 1.0


class RemoteServer:
    """A server with every remote model; it must receive all requests of a sequence in order."""

    def __init__(
        self, loop: SimulatedLoop, network: SimulatedNetwork, address: tuple[str, int], repository: SimulatedRepository
    ) -> None:
        self.loop = loop
        self.repository = repository
        self.connections: set[ServerConnection] = set()
        self.channels: set[SimulatedChannel] = set()
        self.away = False
        #: The faults of the next responses: ``drop``, ``interim`` or ``stall``.
        self.faults: list[str] = []
        self.positions: dict[tuple[str, object], int] = {}
        self._seen: dict[tuple[str, object], float] = {}  # the time of its last request (s)
        self._network = network
        self.address = address
        self._up()

    def fail(self, fault: str, seconds: float) -> None:
        """Cause a fault; ``die`` and ``away`` last for ``seconds``."""
        match fault:
            case "die":
                self._network.listeners.pop(self.address, None)
                self.positions.clear()
                for connection in list(self.connections):
                    connection.transport.abort()
                for channel in list(self.channels):
                    channel.break_off()
                self.loop.later(seconds, self._up)
            case "away":
                self.away = True
                self.positions.clear()
                self.loop.later(seconds, self.heal)
            case _:
                self.faults.append(fault)

    def heal(self) -> None:
        """End all faults."""
        self.away = False
        self.faults.clear()
        self._up()

    @property
    def listens(self) -> bool:
        return self.address in self._network.listeners

    def _up(self) -> None:
        if not self.listens:
            self._network.listen(lambda: _Connection(self), *self.address)

    def answer(self, path: str, header: dict[str, Any], data: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of a response; ``header`` and ``data`` are those of an inference request."""
        if self.away:
            return 503, {"error": "the model is being unloaded"}
        if not path.endswith("/infer"):
            return 200, {}
        model = path.split("/")[3]
        options = header.get("parameters", {})
        place = 0
        if options.get("sequence_id"):
            key = model, options["sequence_id"]
            if options.get("sequence_start"):
                self.positions[key] = -1
            elif self.loop.time() - self._seen.get(key, 0.0) > SEQUENCE_IDLE_SECONDS:
                self.positions.pop(key, None)
            self._seen[key] = self.loop.time()
            if key not in self.positions:
                return 400, {"error": "the first request of a sequence must specify the start flag"}
            self.positions[key] += 1
            place = self.positions[key]
            if options.get("sequence_end"):
                del self.positions[key]
        value = struct.unpack_from("<q", data)[0]
        output = {"name": "OUT", "datatype": "INT64", "shape": header["inputs"][0]["shape"]}
        output["data"] = [value, self.repository.stamps[model][-1], place]
        return 200, {"model_name": model, "model_version": "1", "outputs": [output]}


class _Connection(ServerConnection):
    def __init__(self, server: RemoteServer) -> None:
        super().__init__(server.connections)
        self._server = server
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lines = head.decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(fields.get("content-length", 0))
        if len(rest) < length:
            return
        body, self._buffer = rest[:length], rest[length:]
        size = int(fields.get("inference-header-content-length", 0))
        document = json.loads(body[:size]) if size else {}
        fault = self._server.faults.pop(0) if self._server.faults and length else ""
        if fault == "drop":
            self.transport.abort()
            return
        status, answer = self._server.answer(lines[0].split()[1], document, body[size:])
        text = json.dumps(answer).encode()
        reply = f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text
        if fault == "interim":
            reply = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + reply
        loop = self._server.loop
        seconds = loop.latency(0.002) + (30.0 if fault == "stall" else 0.0)
        loop.later(seconds, partial(loop.arrive, self.transport.write, reply))


class SimulatedChannel:
    """A gRPC channel to a remote server; see :class:`conch.server.execution.remote.executor.RemoteTransport`."""

    def __init__(self, server: RemoteServer, model: RemoteModel) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        self._server = server
        self._model = model
        self._calls: set[asyncio.Future[Any]] = set()

    async def check(self) -> None:
        try:
            async with asyncio.timeout(self._model.connect_timeout):
                await self._connect()
                status, answer = await self._call("/ready")
        except TimeoutError:
            raise unavailable("no answer in time") from None
        if status != 200:
            raise unavailable(str(answer["error"]))

    async def config(self) -> ModelConfig:
        raise unavailable("simulated servers have no configurations")

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        options: dict[str, Any] = {"sequence_id": request.correlation_id} if request.correlation_id else {}
        options |= {
            "sequence_start": bool(request.flags & SEQUENCE_START), "sequence_end": bool(request.flags & SEQUENCE_END)
        }  # fmt: skip
        tensor = request.inputs["IN"]
        header = {"inputs": [{"shape": list(tensor.shape)}], "parameters": options}
        data = bytes(tensor.data)
        async with asyncio.timeout(seconds):
            await self._connect()
            status, answer = await self._call(f"/v2/models/{self._model.name}/infer", header, data)
            if status != 200:
                raise ConchError(answer["error"], Code.UNAVAILABLE if status == 503 else Code.INVALID_ARG)
            (output,) = answer["outputs"]
            value, stamp, place = output["data"]
            if not self._model.decoupled:
                deliver(_response(output["shape"], value, stamp, place, final=True))
                return
            for place in range(struct.unpack_from("<q", data, 16)[0]):
                await self._wait(self._server.loop.latency(0.005))
                deliver(_response(output["shape"], value, stamp, place, final=False))
            await self._wait(self._server.loop.latency(0.001))
            deliver(InferResponse())

    async def close(self) -> None:
        self.break_off()
        await asyncio.sleep(0)

    def break_off(self) -> None:
        """Break the connection and its calls."""
        self._server.channels.discard(self)
        calls, self._calls = self._calls, set()
        for call in calls:
            if not call.done():
                call.set_exception(LostError("the connection broke"))
        self._server.loop.call_soon(self.on_broken)

    async def _connect(self) -> None:
        if self not in self._server.channels:
            await self._wait(self._server.loop.latency(0.0005))
            if not self._server.listens:
                raise UnreachableError("no connection: Connection refused")
            self._server.channels.add(self)

    async def _call(self, path: str, header: Any = None, data: bytes = b"") -> tuple[int, dict[str, Any]]:
        server = self._server
        await self._wait(server.loop.latency(0.001))
        fault = server.faults.pop(0) if server.faults and data else ""
        if fault == "drop":
            self.break_off()
            raise LostError("the connection broke")
        answer = server.answer(path, header or {}, data)
        await self._wait(server.loop.latency(0.001) + (30.0 if fault == "stall" else 0.0))
        return answer

    async def _wait(self, seconds: float) -> None:
        """Wait for ``seconds``. Raises LostError if the connection breaks first."""
        loop = self._server.loop
        call: asyncio.Future[Any] = loop.create_future()
        self._calls.add(call)
        loop.later(seconds, partial(loop.arrive, _end, call))
        try:
            await call
        finally:
            self._calls.discard(call)


def _end(call: asyncio.Future[Any]) -> None:
    if not call.done():
        call.set_result(None)


def _response(shape: list[int], value: int, stamp: int, place: int, *, final: bool) -> InferResponse:
    data = struct.pack("<3q", value, stamp, place)
    return InferResponse([WireTensor("OUT", "INT64", tuple(shape), data)], final=final)


def channels_to(servers: list[RemoteServer]) -> Callable[[RemoteUrl, RemoteModel], SimulatedChannel]:
    """Return a factory of channels to ``servers``, in place of
    :class:`conch.server.execution.remote.grpc_calls.RemoteGrpc`.
    """
    by_address = {server.address: server for server in servers}
    return lambda url, model: SimulatedChannel(by_address[url.host, url.port], model)
