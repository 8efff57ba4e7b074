"""A server whose log is not read keeps serving, and later reports the number of lost lines."""

from __future__ import annotations

import http.client
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.models import build
from tests.servers import ConchServer

pytestmark = pytest.mark.timeout(120)


def test_pipe_without_a_reader_does_not_stop_the_server(tmp_path: Path) -> None:
    build(tmp_path / "models", "add_sub")
    server = ConchServer(tmp_path / "models", "--log-verbose=1")
    process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        server.process = process
        assert process.stderr is not None
        for line in process.stderr:
            if b"Started HTTPService" in line:
                break
        connection = http.client.HTTPConnection(server.http, timeout=60)
        # Not read from here on: far more lines than the pipe and the server hold.
        for _ in range(6_000):
            connection.request("GET", "/v2")
            assert connection.getresponse().read().startswith(b'{"name":')
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().status == 200
        text = bytearray()
        reader = threading.Thread(target=lambda: text.extend(process.stderr.read()))  # type: ignore[union-attr]
        reader.start()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        reader.join(30)
        assert b" log lines were lost, because the reader" in text
        assert b"The server has stopped." in text
    finally:
        process.kill()
        process.wait()
