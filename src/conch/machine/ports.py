"""Checks whether a TCP port of this machine is free, and which program uses it.

Used by commands, and when a server cannot start.
"""

from __future__ import annotations

import socket


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """Return the program that listens on the port, with its process ID, as far as this user may see it."""
    import psutil  # not needed by a server that starts

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f"{' '.join(process.cmdline()[:4]) or process.name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return "a program of another user"
