"""Runs pytest several times at once, so that tests which do not measure share the cores.

    python -m tests.side_by_side "tests/unit --ignore=tests/unit/perf" "tests/docs tests/examples"

Each argument is a command line of pytest's.  The first one's output appears as it comes, that of each other one when
all before it have ended.  Ends with 1 unless all have passed.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO


def main(runs: Sequence[str]) -> int:
    """Run them all; returns the exit status."""
    with ExitStack() as open_files:
        started: list[tuple[str, subprocess.Popen[bytes], IO[bytes] | None]] = []
        for arguments in runs:
            output = open_files.enter_context(tempfile.TemporaryFile()) if started else None
            command = [sys.executable, "-m", "pytest", *shlex.split(arguments)]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT if output else None)
            started.append((arguments, process, output))
        statuses = [_ended(*one) for one in started]
    return int(any(statuses))


def _ended(arguments: str, process: subprocess.Popen[bytes], output: IO[bytes] | None) -> int:
    """Wait for one run, and show what it has printed elsewhere; returns its exit status."""
    print(f"pytest {arguments}", flush=True)
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:  # which all of them get: each ends as pytest does
            continue
    if status < 0:
        print(f"pytest {arguments}: ended by {signal.Signals(-status).name}", flush=True)
    if output is not None:
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout.buffer)
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
