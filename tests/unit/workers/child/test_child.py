"""The program of a worker, with several threads."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

from conch.workers.child import worker as program
from conch.workers.child.channel import Endpoint, write

BACKEND = """\
    import threading

    class Backend:
        threads = 2

        def __init__(self, channel, header): ...

        def start(self, instance, config):
            return False

        def execute(self, header, payload):
            self.before_computing()
            if threading.current_thread() is threading.main_thread():
                threading.Event().wait()
            raise SystemExit("enough")
    """


def test_a_thread_that_ends_takes_the_worker_along_so_that_nothing_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(textwrap.dedent(BACKEND))
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, program.__file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": str(tmp_path)},
                stderr=subprocess.PIPE,
            )
        endpoint = Endpoint()
        for header in (
            {"op": "init", "backend": "ending:Backend"},
            {"op": "start", "instance": {}, "config": "{}"},
            {"op": "execute", "batch": 1},
            {"op": "execute", "batch": 2},
        ):
            write(ours, endpoint.encode(header))
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"SystemExit: enough" in said


TURNS = """\
    import threading

    class Backend:
        threads = 3

        def __init__(self, channel, header):
            self.channel = channel
            self.inside = threading.Lock()

        def start(self, instance, config):
            return False

        def execute(self, header, payload):
            alone = self.inside.acquire(False)
            self.channel.send({"op": "told", "alone": alone})
            self.inside.release()
            self.before_computing()
            threading.Event().wait()

        def control(self, header):
            self.channel.send({"op": "told", "alone": True})
            return True
    """


def test_while_two_threads_compute_the_third_receives(tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text(textwrap.dedent(TURNS))
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, program.__file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": str(tmp_path)},
            )
        try:
            endpoint = Endpoint()
            for header in (
                {"op": "init", "backend": "turns:Backend"},
                {"op": "start", "instance": {}, "config": "{}"},
                {"op": "execute", "batch": 1},
                {"op": "execute", "batch": 2},
                {"op": "cancel", "serial": 1},
            ):
                write(ours, endpoint.encode(header))
            frames = []
            while len(frames) < 5:
                frames += [frame[0] for frame in endpoint.receive(ours)]
        finally:
            process.kill()
            process.wait()
    assert [frame["op"] for frame in frames] == ["heartbeat", "ready", "told", "told", "told"]
    assert all(frame["alone"] for frame in frames[2:])
