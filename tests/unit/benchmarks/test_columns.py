"""The servers of the generation benchmark are stopped while others are measured, and end with it in any case."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

from tests.events import eventually

#: Starts one server, a process that sleeps, as the benchmark starts its servers, and then waits.
_SCRIPT = """
import subprocess, time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from benchmarks.generation import columns

@contextmanager
def server(directory, log, env):
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield SimpleNamespace(http="", process=process)
    finally:
        process.terminate()
        process.wait()

columns.ConchServer = server
columns.write = lambda *model: None
with columns.start(["model"], "auto", [], Path()) as (column,):
    print(column.pid, flush=True)
    time.sleep(60)
"""


def test_a_benchmark_ended_by_sigterm_leaves_no_stopped_server() -> None:
    with subprocess.Popen([sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        eventually(lambda: server.status() == psutil.STATUS_STOPPED, "the stop of the server")
        run.send_signal(signal.SIGTERM)
        run.wait(60)

    assert not server.is_running()
