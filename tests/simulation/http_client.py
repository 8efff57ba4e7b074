"""A client of the HTTP front end on one connection: it may send requests before earlier ones are answered."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from conch.errors import Code, ConchError, unavailable
from conch.inference import InferResponse
from conch.tensors import WireTensor
from conch.wire.json.outgoing import decode_error

#: Called with each response to a request.
OnResponse = Callable[[InferResponse], None]


class SimulatedHttpClient:
    """Sends what it is given in order; ``lost`` says whether the connection has ended."""

    def __init__(self, on_unasked: Callable[[str], None]) -> None:
        self.lost = False
        self._transport: Any = None
        self._waiting: deque[OnResponse] = deque()
        self._unsent: list[bytes] = []
        self._buffer = b""
        self._on_unasked = on_unasked
        self._gone = False

    def infer(
        self,
        model: str,
        id: str,
        values: Sequence[int],
        batched: bool,
        options: dict[str, Any],
        on_response: OnResponse,
    ) -> None:
        """Send an inference request; ``options`` are its parameters."""
        document = {
            "id": id,
            "inputs": [{"name": "IN", "shape": [1, 3] if batched else [3], "datatype": "INT64", "data": list(values)}],
        }
        if options:
            document["parameters"] = options
        body = json.dumps(document).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        self._waiting.append(on_response)
        if self._transport is None:
            self._unsent.append(head.encode() + body)
        else:
            self._transport.write(head.encode() + body)

    def hang_up(self) -> None:
        """Go away without waiting for answers."""
        self._gone = True
        self._waiting.clear()
        if self._transport is not None:
            self._transport.abort()

    def refused(self) -> None:
        """There is no server to connect to."""
        self.connection_lost(None)

    # Called by the transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._gone:
            transport.abort()
        for data in self._unsent:
            transport.write(data)
        self._unsent.clear()

    def pause_writing(self) -> None:
        """Programs send little."""

    def resume_writing(self) -> None:
        """Programs send little."""

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
            self._waiting.popleft()(_response(int(lines[0].split()[1]), body))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        waiting, self._waiting = self._waiting, deque()
        for on_response in waiting:
            on_response(InferResponse(error=CONNECTION_LOST))


#: How a request ends whose connection the server has closed before it answered.
CONNECTION_LOST = unavailable("the connection was closed before the request was answered")


def _response(status: int, body: bytes) -> InferResponse:
    if status != 200:
        try:
            return InferResponse(error=decode_error(status, body))
        except ConchError as error:
            return InferResponse(error=error)
    document = json.loads(body)
    try:
        outputs = [
            WireTensor(output["name"], output["datatype"], tuple(output["shape"]), struct.pack("<3q", *output["data"]))
            for output in document["outputs"]
        ]
    except (KeyError, struct.error) as error:
        return InferResponse(error=ConchError(f"no response: {error!r} {body!r:.200}", Code.UNKNOWN))
    return InferResponse(outputs)
