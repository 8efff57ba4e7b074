"""The processor time of a group of threads, which others do not add to."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from conch.backends.generation.compilation import ThreadGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads inherit names on Linux")

SECONDS = 0.2


def compute() -> None:
    until = time.thread_time() + SECONDS
    while time.thread_time() < until:
        pass


def run(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def test_threads_that_are_started_within_count_also_after_their_end() -> None:
    group = ThreadGroup("conch-tests")
    with group.joined():
        before = group.seconds()
        compute()
        run(threading.Thread(target=compute))
        assert group.seconds() - before >= 2 * SECONDS


def test_threads_outside_do_not_count() -> None:
    group = ThreadGroup("conch-tests")
    computed, measured = threading.Event(), threading.Event()

    def other() -> None:
        compute()
        computed.set()
        measured.wait(60)

    thread = threading.Thread(target=other)
    with group.joined():
        before = group.seconds()
    thread.start()
    computed.wait(60)
    used = group.seconds() - before
    measured.set()
    thread.join()
    assert used < SECONDS / 2
