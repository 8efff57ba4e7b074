"""Processes that Ctrl+C does not reach."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from conch.measure.perf.senders.generator import PipedProcesses


def _tell(pipe: Connection) -> None:
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_the_signal_is_blocked_in_the_process_and_in_no_other() -> None:
    processes = PipedProcesses()
    assert processes.start(_tell).recv() is True
    processes.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
