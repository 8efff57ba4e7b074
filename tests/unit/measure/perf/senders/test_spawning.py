"""Processes that Ctrl+C does not reach."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection

from conch.measure.perf.senders.generator import start_process


def _tell(pipe: Connection) -> None:
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_the_signal_is_blocked_in_the_process_and_in_no_other() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_tell, args=(theirs,))
    start_process(process)
    assert ours.recv() is True
    process.join()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
