"""A server process with its log, and what ends it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from conch.machine.guarded_server import GuardedServer
from tests.events import eventually

#: Starts a process of its own, logs, and waits.
PROGRAM = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print("I0101 00:00:00.000000 1 x.py:1] started", flush=True)
child.wait()
"""
LOG = "print('E0101 00:00:00.000000 1 x.py:1] no memory'); print('bye'); raise SystemExit(3)"


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_server_that_has_ended_is_described_by_its_status_and_its_errors(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("E0101 00:00:00.000000 1 x.py:1] of an earlier server\n")
    server = GuardedServer(command(LOG), tmp_path / "log")
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    assert server.exit_message == "conch serve has ended with status 3:\nno memory"
    assert server.complaints(server.log_size()) == ""
    server.close()


def test_closed_server_leaves_no_process_of_its_group(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    server = GuardedServer(command(PROGRAM), tmp_path / "log")
    eventually(lambda: "started" in server.log_text(), "the start")
    assert server.exit_message == ""
    processes = [process for process in psutil.Process().children(recursive=True) if process not in before]
    server.close()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert len(processes) >= 3 and alive == []
