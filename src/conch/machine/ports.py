"""TCP ports: whether one is free or accepts connections, which processes listen on it, and how URLs show addresses.

Used by commands and clients, and when a server cannot start.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conch.core.errors import one_line, unavailable

if TYPE_CHECKING:
    from psutil import Process


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def check_listens(host: str, port: int, seconds: float, failure: str) -> None:
    """Raise UNAVAILABLE with the message ``failure`` and the cause unless a connection is made within ``seconds``."""
    try:
        socket.create_connection((host, port), seconds).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: an invalid port or host name
        raise unavailable(f"{failure}: {one_line(error)}") from None


def listening_processes(port: int) -> list[Process]:
    """Return the processes that listen on the port, as far as this user may see them.

    psutil names an arbitrary one of those that inherited the socket. Raises psutil.Error and OSError.
    """
    import psutil  # not needed by a server that starts

    pids = {connection.pid for connection in psutil.net_connections("tcp") if listens(connection, port)}
    return [psutil.Process(pid) for pid in sorted(pids - {None})]


def listens(connection: Any, port: int) -> bool:
    """Return whether a connection, as psutil describes it, is a listener on the port."""
    return bool(connection.status == "LISTEN" and connection.laddr.port == port)


def holder(port: int) -> str:
    """Return the program that listens on the port, with its process ID, as far as this user may see it."""
    import psutil

    with suppress(psutil.Error, OSError):
        for process in listening_processes(port):
            return f"{' '.join(process.cmdline()[:4]) or process.name()} (pid {process.pid})"
    return "a program of another user"


def host_and_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
