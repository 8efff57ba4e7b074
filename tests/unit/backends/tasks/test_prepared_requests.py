"""Prepared requests when several threads deal with the frames about them."""

import threading

from conch.backends.base.arrays import Request
from conch.backends.tasks.huggingface_backend import PreparedRequests
from conch.backends.tasks.task import PreparedRequest


def prepared(serial: int) -> tuple[Request, PreparedRequest]:
    request = Request({}, frozenset(), serial=serial)
    return request, PreparedRequest(request)


def test_a_prepared_request_is_taken_once() -> None:
    waiting = PreparedRequests()
    request, ready = prepared(1)
    waiting.add(request, ready)
    assert waiting.request(1) is request
    assert waiting.take(request) is ready
    assert waiting.take(request) is None


def test_a_request_that_came_with_its_execution_was_not_prepared() -> None:
    assert PreparedRequests().take(prepared(1)[0]) is None


def test_an_execution_waits_for_the_thread_that_still_prepares() -> None:
    waiting = PreparedRequests()
    request, ready = prepared(1)
    found: list[Request] = []
    runner = threading.Thread(target=lambda: found.append(waiting.request(1)))
    runner.start()
    waiting.add(request, ready)
    runner.join(60)
    assert found == [request]


def test_a_request_dropped_before_it_was_prepared_is_not_kept() -> None:
    waiting = PreparedRequests()
    waiting.drop(1)
    waiting.add(*prepared(1))
    assert waiting.take(prepared(1)[0]) is None
    waiting.add(*prepared(1))
    assert waiting.take(prepared(1)[0]) is not None  # nor is the drop


def test_a_dropped_request_is_forgotten() -> None:
    waiting = PreparedRequests()
    waiting.add(*prepared(1))
    waiting.drop(1)
    assert waiting.take(prepared(1)[0]) is None
