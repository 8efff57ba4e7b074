"""A client of the HTTP front end on one connection: it may send requests before earlier ones are answered."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from conch.errors import Code, ConchError
from conch.inference import InferResponse
from conch.tensors import WireTensor
from conch.wire.json.outgoing import decode_error
from tests.simulation.connection import CONNECTION_LOST, ClientConnection, OnResponse
from tests.simulation.shared_memory import ClientMemory


class SimulatedHttpClient(ClientConnection):
    """Sends requests in order."""

    def __init__(self, on_unasked: Callable[[str], None]) -> None:
        super().__init__()
        self._waiting: deque[Callable[[int, bytes], None]] = deque()
        self._buffer = b""
        self._on_unasked = on_unasked

    def infer(
        self,
        model: str,
        id: str,
        values: Sequence[int],
        batched: bool,
        options: dict[str, Any],
        on_response: OnResponse,
        memory: ClientMemory,
        region: str = "",
    ) -> None:
        """Send an inference request; ``options`` are its parameters.

        With a ``region``, its input and its output are in ``memory``, which is registered by that name.
        """
        tensor: dict[str, Any] = {"name": "IN", "shape": [1, 3] if batched else [3], "datatype": "INT64"}
        document: dict[str, Any] = {"id": id, "inputs": [tensor]}
        read_output = None
        if region:
            offset = memory.write_input(values)
            read_output = partial(memory.read_output, offset)
            tensor["parameters"], place = memory.parameters(region, offset)
            document["outputs"] = [{"name": "OUT", "parameters": place}]
        else:
            tensor["data"] = list(values)
        if options:
            document["parameters"] = options
        body = json.dumps(document).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        self._waiting.append(lambda status, body: on_response(_response(status, body, read_output)))
        self._send(head.encode() + body)

    def forget(self) -> None:
        self._waiting.clear()

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            if not self._waiting:
                self._on_unasked(f"an HTTP answer that nobody asked for: {lines[0]} {body[:200]!r}")
                return
            self._waiting.popleft()(int(lines[0].split()[1]), body)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        waiting, self._waiting = self._waiting, deque()
        for on_answer in waiting:
            on_answer(0, b"")


def _response(status: int, body: bytes, read_output: Callable[[], bytes] | None) -> InferResponse:
    """The response in an answer; status 0 for a connection that was lost."""
    if not status:
        return InferResponse(error=CONNECTION_LOST)
    if status != 200:
        try:
            return InferResponse(error=decode_error(status, body))
        except ConchError as error:
            return InferResponse(error=error)
    document = json.loads(body)
    try:
        outputs = [
            WireTensor(
                output["name"],
                output["datatype"],
                tuple(output["shape"]),
                read_output() if read_output is not None else struct.pack("<3q", *output["data"]),
            )
            for output in document["outputs"]
        ]
    except (KeyError, struct.error) as error:
        return InferResponse(error=ConchError(f"no response: {error!r} {body!r:.200}", Code.UNKNOWN))
    return InferResponse(outputs)
