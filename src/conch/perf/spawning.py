"""Starts the processes of a measurement, for which Ctrl+C is not meant: it is for the one that measures."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Final

_CTRL_C: Final = {signal.SIGINT}


def start_process(process: SpawnProcess) -> None:
    """Start a process for which the signal is blocked from its first moment on.

    A process that ignored it itself would die with a traceback if it came before, while modules are imported.
    """
    resource_tracker.ensure_running()  # which would unblock the signal if it were started below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CTRL_C)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
