"""A client of the HTTP front end, or of a platform's port, on one connection.

It may send requests before earlier ones are completed.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from conch.core.errors import Code, ConchError
from conch.core.inference import InferResponse
from conch.core.tensors import WireTensor
from conch.wire.json.outgoing import decode_error
from tests.simulation.connection import CONNECTION_LOST, ClientConnection, OnResponse
from tests.simulation.shared_memory import ClientMemory

_INFER = struct.Struct("<3q")
_LENGTH = "inference-header-content-length"
#: How SageMaker and Vertex AI specify the size of the JSON before binary tensors.
_BINARY = "application/vnd.{}-triton.binary+json;json-header-size="


class SimulatedHttpClient(ClientConnection):
    """Sends requests in order to the port of ``platform``, or to the HTTP port (``http``).

    ``compressed`` makes it accept compressed responses.
    """

    def __init__(self, on_unasked: Callable[[str], None], platform: str = "http", *, compressed: bool = False) -> None:
        super().__init__()
        self._platform = platform
        self._compressed = compressed
        self._waiting: deque[Callable[[int, dict[str, str], bytes], None]] = deque()
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
        binary: str = "",
    ) -> None:
        """Send an inference request; ``options`` are its parameters.

        With a ``region``, the input and the output are in ``memory``, which is registered under that name. ``binary``
        selects the tensors that follow the JSON as bytes: "" for none, ``outputs``, or ``all``.
        """
        tensor: dict[str, Any] = {"name": "IN", "shape": [1, 3] if batched else [3], "datatype": "INT64"}
        document: dict[str, Any] = {"id": id, "inputs": [tensor]}
        read_output = None
        if region:
            offset = memory.write_input(values)
            read_output = partial(memory.read_output, offset)
            tensor["parameters"], place = memory.parameters(region, offset)
            document["outputs"] = [{"name": "OUT", "parameters": place}]
            binary = ""
        data = _INFER.pack(*values) if binary == "all" else b""
        if data:
            tensor["parameters"] = {"binary_data_size": len(data)}
        elif not region:
            tensor["data"] = list(values)
        options = {**options, "binary_data_output": True} if binary else options
        if options:
            document["parameters"] = options
        text = json.dumps(document).encode()
        path, fields = self._addressed(model, len(text) if data else 0)
        fields += "accept-encoding: gzip\r\n" if self._compressed else ""
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\n{fields}content-length: {len(text) + len(data)}\r\n\r\n"

        def answered(status: int, fields: dict[str, str], body: bytes) -> None:
            if self._compressed and fields.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            on_response(_response(status, self._header_size(fields) if binary else None, body, read_output))

        self._waiting.append(answered)
        self._send(head.encode() + text + data)

    def _addressed(self, model: str, size: int) -> tuple[str, str]:
        """Return the path and further header lines of a request; ``size`` is the JSON's (bytes) if tensors follow."""
        length = f"{_LENGTH}: {size}\r\n" if size else ""
        match self._platform:
            case "sagemaker":
                return "/invocations", f"content-type: {_BINARY.format('sagemaker')}{size}\r\n" if size else ""
            case "vertex-ai":
                redirect = f"x-vertex-ai-triton-redirect: v2/models/{model}/infer\r\n"
                return "/predict", redirect + (f"content-type: {_BINARY.format('vertex-ai')}{size}\r\n" if size else "")
            case "oci":
                return "/predict", length
        return f"/v2/models/{model}/infer", length

    def _header_size(self, fields: dict[str, str]) -> int | None:
        """Return the size of the JSON before binary tensors as the platform's clients read it; None without tensors."""
        size = fields.get(_LENGTH)
        if self._platform == "sagemaker":
            _, found, size = fields.get("content-type", "").partition(_BINARY.format("sagemaker"))
            size = size if found else None
        return int(size) if size is not None else None

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
            self._waiting.popleft()(int(lines[0].split()[1]), headers, body)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        waiting, self._waiting = self._waiting, deque()
        for on_answer in waiting:
            on_answer(0, {}, b"")


def _response(status: int, size: int | None, body: bytes, read_output: Callable[[], bytes] | None) -> InferResponse:
    """Return the inference response in an HTTP response with ``size`` bytes of JSON; status 0 is a lost connection."""
    if not status:
        return InferResponse(error=CONNECTION_LOST)
    if status != 200:
        try:
            return InferResponse(error=decode_error(status, body))
        except ConchError as error:
            return InferResponse(error=error)
    try:
        document = json.loads(body[:size])
        (output,) = document["outputs"]
        if read_output is not None:
            data = read_output()
        elif size is not None:
            data = body[size:]
            _INFER.unpack(data)
        else:
            data = _INFER.pack(*output["data"])
        tensor = WireTensor(output["name"], output["datatype"], tuple(output["shape"]), data)
    except (KeyError, ValueError, struct.error) as error:
        return InferResponse(error=ConchError(f"no response: {error!r} {body!r:.200}", Code.UNKNOWN))
    return InferResponse([tensor])
