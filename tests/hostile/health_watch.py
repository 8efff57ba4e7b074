"""Sends a health request to a server every 10 ms, from a separate process with its own connection.

``python health_watch.py <address> <pid>`` runs until its standard input ends, and then prints the longest wait (s) and
the server's maximum resident memory (bytes); :class:`HealthWatch` starts it. It imports only the standard library and
psutil; as a separate process, it is not slowed down by the attack. A wait does not include the time in which the
server's event loop, or this process, could run and other programs had the cores: the result is the same on a busy
machine.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from time import monotonic, sleep
from types import TracebackType
from typing import Final, NamedTuple

import psutil

_REQUEST: Final = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
_PERIOD: Final = 0.01
#: Timeout of a health request (s).
_PATIENCE: Final = 60.0


class Seen(NamedTuple):
    longest_wait: float
    peak: int


class HealthWatch:
    """Watches a server from ``__enter__`` until :meth:`stop`."""

    def __init__(self, http: str, pid: int) -> None:
        self._command = [sys.executable, __file__, http, str(pid)]
        self._seen: Seen | None = None

    def __enter__(self) -> HealthWatch:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "watching\n"
        return self

    def stop(self) -> Seen:
        """Return the result, after the in-flight health request."""
        if self._seen is None:
            longest, peak = self._process.communicate()[0].split()
            self._seen = Seen(float(longest), int(peak))
        return self._seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._seen is None:
            self._process.kill()
            self._process.communicate()


def main(address: str, pid: int) -> None:
    """Watch until standard input ends."""
    host, port = address.split(":")
    server = psutil.Process(pid)
    longest, peak = 0.0, 0
    connection = _connect(host, int(port))
    print("watching", flush=True)
    while not select.select([0], [], [], 0)[0]:
        sent, starved = monotonic(), _starved_seconds(pid)
        try:
            connection.sendall(_REQUEST)
            reply = connection.recv(4096)
        except OSError:
            reply = b""
        longest = max(longest, monotonic() - sent - (_starved_seconds(pid) - starved))
        if not reply.startswith(b"HTTP/1.1 200"):
            # Closed, refused or timed out: counts as no response.
            longest = _PATIENCE
            break
        peak = max(peak, server.memory_info().rss)
        sleep(_PERIOD)
    print(longest, peak)


def _starved_seconds(pid: int) -> float:
    """Return how long the main threads of the process and of this one have waited for a core (s); 0 if unknown."""
    nanoseconds = 0
    for process in (str(pid), "self"):
        try:
            with open(f"/proc/{process}/schedstat") as file:
                nanoseconds += int(file.read().split()[1])
        except (OSError, IndexError):  # it has ended, or the kernel does not count
            pass
    return nanoseconds / 1e9


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    os.set_inheritable(connection.fileno(), False)
    return connection


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
