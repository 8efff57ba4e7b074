"""Requests that end each other, as the steps of one ensemble do, while they wait in one queue."""

import weakref

from conch.core.errors import unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.server.schedulers.queue import QueuePolicy, RequestQueue

MS = 1_000_000


def siblings(queue: RequestQueue, *priorities: int) -> list[InferRequest]:
    """Requests of which each, when it fails, cancels the others."""
    requests: list[InferRequest] = []

    def give_up(response: InferResponse) -> None:
        for request in requests:
            request.cancel()

    for priority in priorities:
        request = InferRequest("m", {}, give_up, priority=priority)
        requests.append(request)
        queue.add(request, 0)
    return requests


def test_siblings_that_are_drained_are_counted_once() -> None:
    queue = RequestQueue()
    siblings(queue, 0, 0)
    for request in queue.drain():
        request.fail(unavailable("no worker"))
    assert len(queue) == 0
    queue.add(InferRequest("m", {}, print), 0)
    assert len(queue) == 1


def test_sibling_of_a_late_request_never_runs() -> None:
    late = QueuePolicy(default_timeout_us=1000)
    queue = RequestQueue(levels=2, default_level=1, level_policies={2: late})
    first, second = siblings(queue, 1, 2)
    assert list(queue.in_order(MS)) == []
    assert first.finished
    assert second.finished
    assert len(queue) == 0


def test_cancelled_requests_do_not_pile_up_while_no_instance_asks() -> None:
    class TrackedRequest(InferRequest):
        """A request with weak references."""

    queue = RequestQueue(limit=10)
    requests = []
    for _ in range(1000):
        request = TrackedRequest("m", {}, lambda response: None)
        requests.append(weakref.ref(request))
        queue.add(request, 0)
        request.cancel()
    assert sum(request() is not None for request in requests) < 50
