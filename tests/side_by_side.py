"""Runs pytest several times, two at once, so that tests which do not measure share the cores.

    python -m tests.side_by_side --beside tests/unit/measure/perf "tests/unit/server" "tests/docs tests/examples"

Each argument is a command line of pytest's; the next one is started when one has ended. Those after ``--beside`` run
beside the two, one after another: what mostly waits comes first, and what bears a busy machine follows. The first one's
output appears as it comes, that of each other one when it and all before it have ended. Ends with 1 unless all have
passed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Final

#: More of them finish sooner, and let the real Triton crash now and then, whose stubs bear no busy machine.
AT_ONCE: Final = 2
_LOOK_SECONDS: Final = 0.2


class _Run:
    """One run of pytest; with ``output``, which is shown when it has ended."""

    def __init__(self, arguments: str, output: IO[bytes] | None) -> None:
        self.arguments = arguments
        self._output = output
        command = [sys.executable, "-m", "pytest", *shlex.split(arguments)]
        self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT if output else None)

    def show(self) -> None:
        """Show what it has printed elsewhere, and what ended it."""
        print(f"pytest {self.arguments}", flush=True)
        if self.process.returncode < 0:
            print(f"pytest {self.arguments}: ended by {signal.Signals(-self.process.returncode).name}", flush=True)
        if self._output is not None:
            self._output.seek(0)
            shutil.copyfileobj(self._output, sys.stdout.buffer)
            sys.stdout.flush()


@dataclass
class _Lane:
    """Runs of which ``at_once`` run at a time."""

    waiting: deque[str]
    at_once: int
    started: list[_Run] = field(default_factory=list)

    def running(self) -> int:
        return sum(run.process.poll() is None for run in self.started)


def main(runs: Sequence[str], beside: Sequence[str] = ()) -> int:
    """Run them all, those of ``beside`` one after another beside the others; returns the exit status."""
    lanes = [_Lane(deque(beside), 1), _Lane(deque(runs), AT_ONCE)]
    started, shown = list[_Run](), 0
    with ExitStack() as open_files:
        while any(lane.waiting for lane in lanes) or shown < len(started):
            try:
                for lane in lanes:
                    while lane.waiting and lane.running() < lane.at_once:
                        output = open_files.enter_context(tempfile.TemporaryFile()) if started else None
                        lane.started.append(_Run(lane.waiting.popleft(), output))
                        started.append(lane.started[-1])
                while shown < len(started) and started[shown].process.poll() is not None:
                    started[shown].show()
                    shown += 1
                time.sleep(_LOOK_SECONDS)
            except KeyboardInterrupt:  # which those that run get as well: each ends as pytest does
                for lane in lanes:
                    lane.waiting.clear()
    return int(len(started) < len(beside) + len(runs) or any(run.process.returncode for run in started))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.side_by_side")
    parser.add_argument("--beside", action="append", default=[], metavar="RUN")
    parser.add_argument("runs", nargs="*", metavar="RUN")
    arguments = parser.parse_args()
    sys.exit(main(arguments.runs, arguments.beside))
