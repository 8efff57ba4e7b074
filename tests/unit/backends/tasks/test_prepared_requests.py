"""Prepared requests when several threads deal with the frames about them."""

import json
import socket
import threading
from typing import Any

from conch.backends.base.arrays import Request
from conch.backends.tasks.huggingface_backend import HuggingFaceBackend, PreparedRequests
from conch.backends.tasks.task import PreparedRequest
from conch.workers.child.channel import Channel, Endpoint


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


def test_requests_that_cannot_be_read_when_they_are_prepared_fail_when_they_run() -> None:
    ours, theirs = socket.socketpair()
    config = json.dumps({"max_batch_size": 8})
    init: dict[str, Any] = {"model": {"name": "m"}, "config": config, "log": {}}
    checkpoint: Any = None  # nothing is computed
    backend = HuggingFaceBackend(Channel(theirs), init, checkpoint)
    absent = ["text", "BYTES", [1, 1], 5, 99, 0]  # in the channel buffer 99
    fields = {"outputs": [], "id": "", "parameters": {}, "inputs": [absent]}
    backend.prepare({"op": "prepare", "requests": [{"serial": serial, **fields} for serial in (1, 2)]}, bytearray())
    backend.execute({"op": "execute", "batch": 1, "requests": [{"serial": 1}, {"serial": 2}]}, bytearray())
    theirs.close()
    frames: list[dict[str, Any]] = []
    with ours:
        while not frames or frames[-1]["op"] != "done":
            frames += [header for header, _ in Endpoint().receive(ours)]
    assert [frame["op"] for frame in frames] == ["prepared", "done"]
    messages = [response["error"][1] for response in frames[-1]["responses"]]
    assert messages == ["channel buffer 99 is unknown"] * 2
