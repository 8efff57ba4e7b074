"""Sends bytes on an HTTP connection without a client library, and reads the responses."""

from __future__ import annotations

import re
import socket
from typing import Final, NamedTuple

_STATUS: Final = re.compile(rb"HTTP/\d\.\d (\d{3})[^\r]*\r\n")


class Exchange(NamedTuple):
    """The statuses of all responses in order, whether the server closed the connection, and everything that it sent."""

    statuses: tuple[int, ...]
    closed: bool
    received: bytes


def connect(address: str, timeout: float = 10) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout)


def exchange(address: str, sent: bytes, patience: float) -> Exchange:
    """Send bytes on a new connection, and read until it is closed or silent for ``patience`` seconds."""
    received, closed = b"", False
    with connect(address) as connection:
        connection.sendall(sent)
        connection.settimeout(patience)
        try:
            while part := connection.recv(1 << 16):
                received += part
            closed = True
        except ConnectionError:
            closed = True
        except TimeoutError:
            pass
    return Exchange(tuple(map(int, _STATUS.findall(received))), closed, received)
