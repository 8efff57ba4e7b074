"""HTTP bodies that are not needed, that stay in memory, or that never end."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from time import monotonic

from tests.conftest import Server
from tests.hostile.attack import attack

_MEGABYTE = 10**6
_TENSOR = "/v2/models/identity_fp32/infer"


@attack("60 MB to a path that does not exist, with `Inference-Header-Content-Length: 1`; six times")
def bodies_for_nobody(server: Server, stack: ExitStack) -> None:
    for _ in range(6):
        _send_and_wait(server, stack, _head("/v2/nothing", 60 * _MEGABYTE, "Inference-Header-Content-Length: 1"), 60)


@attack("60 MB of JSON to the repository index; twice")
def large_index(server: Server, stack: ExitStack) -> None:
    body = b"[" + b"{}," * (20 * _MEGABYTE - 2) + b"{}]"
    for _ in range(2):
        connection = _connect(server, stack)
        _try_to_send(connection, _head("/v2/repository/index", len(body)) + body)
        _read_answer(connection)


@attack("12 connections that stay open after an infer of 30 MB each")
def idle_after_large_infers(server: Server, stack: ExitStack) -> None:
    request = _infer(30 * _MEGABYTE)
    for _ in range(12):
        connection = _connect(server, stack)
        connection.sendall(request)
        assert _read_answer(connection) > 30 * _MEGABYTE


@attack("40 clients that hang up after they sent an infer of 10 MB, another one on each connection")
def hang_up_with_large_infers(server: Server, stack: ExitStack) -> None:
    request = _infer(10 * _MEGABYTE)
    for _ in range(40):
        with ExitStack() as here:
            connection = _connect(server, here)
            connection.settimeout(1)  # the server stops reading while a response is unread
            _try_to_send(connection, request * 2)


def _connect(server: Server, stack: ExitStack) -> socket.socket:
    host, port = server.http.split(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=60))


def _head(path: str, length: int, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers, "", ""]).encode()


def _infer(size: int) -> bytes:
    """Return a request with a tensor of ``size`` bytes; the response contains the same tensor."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [size // 4], "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lengths = f"Inference-Header-Content-Length: {len(header)}"
    return _head(_TENSOR, len(header) + size, lengths) + header + bytes(size)


def _send_and_wait(server: Server, stack: ExitStack, head: bytes, megabytes: int) -> None:
    connection = _connect(server, stack)
    _try_to_send(connection, head + bytes(megabytes * _MEGABYTE))
    _read_answer(connection)


def _try_to_send(connection: socket.socket, data: bytes) -> None:
    """Send as much as the server accepts."""
    try:
        connection.sendall(data)
    except OSError:
        pass


def _read_answer(connection: socket.socket) -> int:
    """Read one response; returns its size, 0 if there is none."""
    answer = bytearray()
    wanted = 1
    try:
        while len(answer) < wanted:
            data = connection.recv(1 << 20)
            if not data:
                return 0
            answer += data
            head, end, _ = bytes(answer[:4096]).partition(b"\r\n\r\n")
            if end:
                length = next(
                    line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                ).removeprefix(b"content-length:")
                wanted = len(head) + len(end) + int(length)
    except OSError:
        return 0
    return len(answer)


@attack("100 connections that each send JSON infers of 250 kB without pause")
def decoding_on_many_connections(server: Server, stack: ExitStack) -> None:
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [60_000], "data": [1.5] * 60_000}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    request = _head(_TENSOR, len(body)) + body
    connections = [_connect(server, stack) for _ in range(100)]
    until = monotonic() + 3
    while monotonic() < until:
        for connection in connections:
            connection.settimeout(0.01)
            _try_to_send(connection, request)
        for connection in connections:
            _read_answer(connection)
