"""HTTP/1.1 connections that send requests without pause, and read the responses as they arrive."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from time import monotonic

from tests.conftest import Server
from tests.hostile.attack import attack

_SECONDS = 1.0

_LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
_STATISTICS = b"GET /v2/models/stats HTTP/1.1\r\nHost: x\r\n\r\n"
_INDEX = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@attack("one HTTP connection that pipelines `GET live`, `POST index`, `GET stats` without pause")
def pipelined_control_requests(server: Server, stack: ExitStack) -> None:
    _send_without_pause(server, stack, (_LIVE + _INDEX + _STATISTICS) * 1000)


@attack("one that pipelines `GET live`")
def pipelined_health_requests(server: Server, stack: ExitStack) -> None:
    _send_without_pause(server, stack, _LIVE * 3000)


@attack("one that pipelines `GET stats`")
def pipelined_statistics(server: Server, stack: ExitStack) -> None:
    _send_without_pause(server, stack, _STATISTICS * 3000)


def _send_without_pause(server: Server, stack: ExitStack, requests: bytes) -> None:
    host, port = server.http.split(":")
    connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=1))
    reader = threading.Thread(target=_read_all, args=(connection,), daemon=True)
    reader.start()
    until = monotonic() + _SECONDS
    try:
        while monotonic() < until:
            connection.sendall(requests)
    except TimeoutError:
        pass  # the server reads no faster than it responds
    connection.shutdown(socket.SHUT_RDWR)
    reader.join(60)


def _read_all(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 20):
            pass
    except OSError:
        pass
