"""``conch perf`` from the command line, where something goes wrong: what there is, is shown and written."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from conch.cli import main
from tests.terminal import hear_ctrl_c
from tests.unit.measure.perf.known_server import KnownServer, running

QUICK = ["-m", "known", "-p", "300", "--warm-up", "0.1", "-s", "900"]


@pytest.mark.long
def test_a_server_that_dies_leaves_what_was_measured_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, document = tmp_path / "out.csv", tmp_path / "out.json"
    # The first level takes some 500 answers; of the last one there is a part.
    with running(KnownServer(service=0.002, slots=1, dies_after=900)) as server:
        options = ["-u", f"127.0.0.1:{server.port}", "--concurrency-range", "1:9:2", "-f", csv, "--json", document]
        status = main(["perf", *QUICK, *map(str, options)])
    assert status == 1
    assert "the server stopped responding" in capsys.readouterr().out.replace("\n", " ")
    levels = json.loads(document.read_text())["levels"]
    assert len(csv.read_text().splitlines()) == 1 + len(levels) < 1 + 5
    assert levels[-1]["gone"] and not levels[0]["gone"] and levels[0]["requests"]


def test_errors_are_told_and_end_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with running(KnownServer(service=0.002, fails=5)) as server:
        assert main(["perf", *QUICK, "-u", f"127.0.0.1:{server.port}"]) == 1
    shown = capsys.readouterr().out
    assert "requests failed and are excluded from the latencies" in shown and "it is the turn of an error" in shown


@pytest.mark.parametrize("protocol", ["http", "grpc", "openai"])
def test_a_server_that_is_down_is_a_sentence(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and there is no listener
        port = taken.getsockname()[1]
        assert main(["perf", *QUICK, "-i", protocol, "-u", f"127.0.0.1:{port}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("no server responds at ") and str(port) in said and said.count("\n") == 1


def test_ctrl_c_shows_and_writes_what_was_measured(tmp_path: Path) -> None:
    document = tmp_path / "out.json"
    options = ["-p", "100", "-r", "100000", "-s", "0.1", "--json", str(document)]

    with running(KnownServer(service=0.003, tells_after=400)) as server:
        command = [sys.executable, "-m", "conch", "perf", *QUICK, "-u", f"127.0.0.1:{server.port}", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c, process_group=0)
        server.reached.wait(60)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the processes that send, too
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped after" in shown
    [level] = json.loads(document.read_text())["levels"]
    assert level["stopped"] and level["requests"] and not level["errors"]


@pytest.mark.parametrize("said", [b"what?\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b""])
def test_something_else_that_listens_is_a_sentence(said: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    def answer() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        assert main(["perf", *QUICK, "-u", f"127.0.0.1:{port}"]) == 1
        assert main(["perf", *QUICK, "-i", "openai", "-u", "a..b:80"]) == 1
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("no server responds at ") and second.startswith("no server responds at a..b:80: ")
