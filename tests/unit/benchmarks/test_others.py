"""Who has used the machine while a server was measured."""

from __future__ import annotations

import subprocess
import sys

import psutil

from benchmarks.generation.others import Others

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"


def test_a_server_of_the_comparison_is_none_of_the_others() -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        process = psutil.Process(server.pid)
        without, with_it = Others(tuple), Others(lambda: [process])
        server.stdout.readline()
        # Read in this order, so that what happens in between counts for the server's side.
        counted, not_counted = with_it.share(), without.share()
        server.stdin.close()
    assert counted < not_counted
