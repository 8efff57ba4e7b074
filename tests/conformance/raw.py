"""Raw requests without a client library: HTTP/1.1 with the standard library, gRPC with its plain stubs."""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """One HTTP request; ``body`` is sent unchanged if it is bytes, otherwise as JSON."""

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()


@dataclass(frozen=True)
class Reply:
    """One HTTP response; ``headers`` has lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Return the message of an error reply; fails unless the body is exactly ``{"error": message}``."""
        answer = self.json()
        assert list(answer) == ["error"], answer
        message: str = answer["error"]
        return message


def send(address: str, request: Request, timeout: float = 30) -> Reply:
    """Send one request on a new connection."""
    host, port = address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout)
    try:
        connection.request(request.method, request.path, request.encoded(), dict(request.headers))
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def get(address: str, path: str) -> Reply:
    return send(address, Request("GET", path))


def post(address: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
    return send(address, Request("POST", path, b"" if body is None else body, headers or {}))


def tensor(name: str, datatype: str, data: Sequence[Any], shape: Sequence[int] | None = None, **more: Any) -> Any:
    """Return one input of a JSON inference request; one-dimensional unless ``shape`` is given."""
    return {"name": name, "shape": list(shape or [len(data)]), "datatype": datatype, "data": list(data), **more}


def binary_body(header: Any, *blobs: bytes) -> tuple[bytes, dict[str, str]]:
    """Return a body of the binary tensor data extension and its header."""
    encoded = json.dumps(header).encode()
    return encoded + b"".join(blobs), {"Inference-Header-Content-Length": str(len(encoded))}


def pack_strings(*elements: bytes) -> bytes:
    """Encode BYTES elements in their wire format."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)
