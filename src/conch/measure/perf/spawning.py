"""Starts and ends the processes of a measurement, so that Ctrl+C reaches only the measuring process."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Final

_CTRL_C: Final = {signal.SIGINT}
#: How long a process may take to end (s).
_END_SECONDS: Final = 5.0


def start_process(process: SpawnProcess) -> None:
    """Start a process with SIGINT blocked from its first instruction.

    If the process ignored the signal itself, a signal during its imports would end it with a traceback.
    """
    resource_tracker.ensure_running()  # it would unblock the signal if it were started below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CTRL_C)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_processes(pipes: Sequence[Connection], processes: Sequence[SpawnProcess]) -> None:
    """Close the pipes, at whose end the processes exit, and kill those that do not."""
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(_END_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
