"""HTTP/1.1 connections that send requests without pause, and read the answers as they come."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from time import monotonic

from tests.conftest import Server
from tests.hostile.attack import attack

_SECONDS = 3.0


@attack("one HTTP connection that pipelines `GET live`, `POST index`, `GET stats` without pause")
def pipelined_control_requests(server: Server, stack: ExitStack) -> None:
    host, port = server.http.split(":")
    connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
    requests = (
        b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        b"GET /v2/models/stats HTTP/1.1\r\nHost: x\r\n\r\n"
    ) * 20
    reader = threading.Thread(target=_read_all, args=(connection,), daemon=True)
    reader.start()
    until = monotonic() + _SECONDS
    while monotonic() < until:
        connection.sendall(requests)
    connection.shutdown(socket.SHUT_WR)
    reader.join(60)


def _read_all(connection: socket.socket) -> None:
    try:
        while connection.recv(1 << 20):
            pass
    except OSError:
        pass
