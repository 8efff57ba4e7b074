"""The request that an artifact must answer before it is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.deploy import trial
from conch.deploy.trial import LocalRun, try_artifact

#: A server that is healthy, and sends its response byte by byte for longer than any client waits.
SLOW_SERVER = """
import http.server, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        for _ in range(100):
            self.wfile.write(b"x")
            threading.Event().wait(0.1)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_response_that_is_not_complete_in_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "request.json").write_text("{}")
    monkeypatch.setattr(trial, "RESPONSE_SECONDS", 0.5)

    def run_locally(written: Path, folder: Path, port: int) -> LocalRun:
        return LocalRun((sys.executable, "-c", SLOW_SERVER, str(port)), {}, "/health", "/predict")

    with pytest.raises(ConchError, match=r"there was no response to request\.json within 0\.5 s"):
        try_artifact(run_locally, tmp_path)
