"""Calls that hang keep nobody waiting when the pool is closed."""

from __future__ import annotations

import threading

import pytest

from conch.errors import Code, ConchError
from conch.repository.stores.pool import DaemonPool


def test_results_and_errors_are_those_of_the_call() -> None:
    pool = DaemonPool("test", 2)
    assert pool.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        pool.run(lambda: 1 // 0)
    pool.close()


def test_no_more_calls_run_at_a_time_than_there_are_places() -> None:
    pool, running, most, lock = DaemonPool("test", 2), 0, 0, threading.Lock()

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(10)
        with lock:
            running -= 1

    barrier = threading.Barrier(2)
    for future in [pool.submit(call) for _ in range(6)]:
        future.result(10)
    assert most == 2
    pool.close()


def test_closing_lets_go_who_waits_for_a_call_that_hangs() -> None:
    pool, hangs, end = DaemonPool("test", 1), threading.Event(), threading.Event()

    def call() -> None:
        hangs.set()
        end.wait(30)

    running, waiting = pool.submit(call), pool.submit(lambda: None)
    assert hangs.wait(10)
    pool.close()
    for future in (running, waiting):
        with pytest.raises(ConchError) as refused:
            future.result(10)
        assert refused.value.code is Code.UNAVAILABLE
    with pytest.raises(ConchError):
        pool.submit(lambda: None)
    end.set()
