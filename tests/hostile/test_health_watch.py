"""The health requests during an attack notice a server that is blocked."""

from __future__ import annotations

import subprocess
import sys
from time import sleep

import pytest

from tests.hostile.health_watch import HealthWatch
from tests.oracle.run import free_ports

#: A server of one connection that responds to the third request after it has computed, or slept, for half a second.
_SERVER = """
import socket, sys, time

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
connection, _ = listener.accept()
requests = 0
while connection.recv(4096):
    requests += 1
    if requests == 3:
        if sys.argv[2] == "computes":
            until = time.process_time() + 0.5
            while time.process_time() < until:
                pass
        else:
            time.sleep(0.5)
        print("blocked", flush=True)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""


@pytest.mark.parametrize("kind", ["computes", "sleeps"])
def test_a_blocked_server_is_noticed_however_busy_the_machine_is(kind: str) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", _SERVER, str(port), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "listening\n"
            with HealthWatch(f"127.0.0.1:{port}", server.pid) as watch:
                assert server.stdout.readline() == "blocked\n"
                sleep(0.01)
                # Starting to compute, or ending the sleep, may itself wait for a core.
                assert watch.stop().longest_wait > 0.4
        finally:
            server.kill()
