"""Requests with large bodies, sequential or cancelled in the queue: completed requests must release their memory."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import ExitStack
from typing import Final

from tests.conftest import Server
from tests.hostile.attack import attack

_MEGABYTE: Final = 1_000_000
_MODEL: Final = "identity_fp32"


@attack("100 infers of 10 MB, one after the other on one connection")
def sequential_bodies(server: Server, stack: ExitStack) -> None:
    host, port = server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.connect()
    assert connection.sock is not None
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stack.callback(connection.close)
    head, body = _infer(10 * _MEGABYTE)
    for _ in range(100):
        connection.request("POST", f"/v2/models/{_MODEL}/infer", body, head)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()[:500]
        while reply.read(1 << 20):
            pass


@attack("1.4 GB of infers whose clients hang up while they wait in the queue")
def hung_up_in_the_queue(server: Server, stack: ExitStack) -> None:
    host, port = server.http.split(":")
    headers, body = _infer(20 * _MEGABYTE)
    lines = {"Host": "x", "Content-Length": str(len(body)), **headers}
    head = f"POST /v2/models/{_MODEL}/infer HTTP/1.1\r\n" + "".join(f"{name}: {lines[name]}\r\n" for name in lines)
    with ExitStack() as connections:
        for _ in range(70):
            connection = connections.enter_context(socket.create_connection((host, int(port)), timeout=60))
            try:
                connection.sendall(head.encode() + b"\r\n")
                connection.sendall(body)
            except OSError:  # refused: too many bytes are in flight
                continue


def _infer(size: int) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a request with a binary tensor of ``size`` bytes."""
    inputs = [
        {"name": "INPUT", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}},
    ]
    outputs = [{"name": "OUTPUT", "parameters": {"binary_data": True}}]
    document = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    return {"Inference-Header-Content-Length": str(len(document))}, document + bytes(size)
