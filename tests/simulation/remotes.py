"""Other servers, which run remote models: they answer, die, drop connections, and turn requests away."""

from __future__ import annotations

import json
import struct
from functools import partial
from typing import Any

from tests.simulation.loop import SimulatedLoop
from tests.simulation.models import SimulatedRepository
from tests.simulation.network import SimulatedNetwork


class RemoteServer:
    """One server for every remote model; a sequence's requests must come to it in order, from the first on."""

    def __init__(
        self, loop: SimulatedLoop, network: SimulatedNetwork, address: tuple[str, int], repository: SimulatedRepository
    ) -> None:
        self.loop = loop
        self.repository = repository
        self.connections: set[_Connection] = set()
        self.away = False
        #: What goes wrong with the next answers: ``drop``, ``interim`` or ``stall``.
        self.faults: list[str] = []
        self.positions: dict[tuple[str, object], int] = {}
        self._network = network
        self._address = address
        self._up()

    def fail(self, fault: str, seconds: float) -> None:
        """Have something go wrong; ``die`` and ``away`` last for ``seconds``."""
        match fault:
            case "die":
                self._network.listeners.pop(self._address, None)
                self.positions.clear()
                for connection in list(self.connections):
                    connection.transport.abort()
                self.loop.later(seconds, self._up)
            case "away":
                self.away = True
                self.positions.clear()
                self.loop.later(seconds, self.heal)
            case _:
                self.faults.append(fault)

    def heal(self) -> None:
        """Answer every further request."""
        self.away = False
        self.faults.clear()
        self._up()

    def _up(self) -> None:
        if self._address not in self._network.listeners:
            self._network.listen(lambda: _Connection(self), *self._address)

    def answer(self, path: str, header: dict[str, Any], data: bytes) -> tuple[int, dict[str, Any]]:
        """The status and the body of an answer; ``header`` and ``data`` are those of an inference request."""
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


class _Connection:
    """The server's end of a connection."""

    transport: Any

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """Answers are small."""

    def resume_writing(self) -> None:
        """Answers are small."""

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
