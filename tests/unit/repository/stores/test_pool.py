"""Hanging calls do not block the closing of the pool."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from conch.core.errors import Code, ConchError
from conch.repository.stores.pool import DaemonPool, SharedCalls


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
        barrier.wait(60)
        with lock:
            running -= 1

    barrier = threading.Barrier(2)
    for future in [pool.submit(call) for _ in range(6)]:
        future.result(60)
    assert most == 2
    pool.close()


def test_calls_of_one_key_are_shared_by_all_who_ask_before_they_begin() -> None:
    pool, begun, end, made = DaemonPool("test", 4), threading.Event(), threading.Event(), count(1)
    shared = SharedCalls(pool)

    def call() -> int:
        number = next(made)
        begun.set()
        assert end.wait(60)
        return number

    first = shared.submit("a", call)
    assert begun.wait(60)
    later = [shared.submit("a", call) for _ in range(3)]
    assert shared.submit("b", lambda: 7).result(60) == 7
    assert not first.done()
    end.set()
    assert [first.result(60), *(future.result(60) for future in later)] == [1, 2, 2, 2]
    assert shared.submit("a", call).result(60) == 3
    pool.close()


def test_shared_call_that_fails_fails_for_all_and_is_made_again() -> None:
    pool = DaemonPool("test", 1)
    shared = SharedCalls(pool)
    with pytest.raises(ZeroDivisionError):
        shared.submit("a", lambda: 1 // 0).result(60)
    assert shared.submit("a", lambda: 3).result(60) == 3
    pool.close()
    with pytest.raises(ConchError) as refused:
        shared.submit("a", lambda: 3).result(60)
    assert refused.value.code is Code.UNAVAILABLE


def test_closing_lets_go_who_waits_for_a_call_that_hangs() -> None:
    pool, hangs, end = DaemonPool("test", 1), threading.Event(), threading.Event()

    def call() -> None:
        hangs.set()
        end.wait(60)

    running, waiting = pool.submit(call), pool.submit(lambda: None)
    assert hangs.wait(60)
    pool.close()
    for future in (running, waiting):
        with pytest.raises(ConchError) as refused:
            future.result(60)
        assert refused.value.code is Code.UNAVAILABLE
    with pytest.raises(ConchError):
        pool.submit(lambda: None)
    end.set()


def test_threads_that_make_no_call_have_ended_when_the_pool_is_closed() -> None:
    pool, hangs, end = DaemonPool("closing", 3), threading.Event(), threading.Event()
    barrier = threading.Barrier(3)
    for future in [pool.submit(lambda: barrier.wait(60)) for _ in range(3)]:
        future.result(60)

    def call() -> None:
        hangs.set()
        end.wait(60)

    pool.submit(call)
    assert hangs.wait(60)
    pool.close()
    assert sum(thread.name.startswith("closing-") for thread in threading.enumerate()) == 1
    end.set()
