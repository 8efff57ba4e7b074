"""A queue of one model: order, limits, timeouts and cancellation, with the time passed in."""

import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.server.schedulers.queue import QueuePolicy, RequestQueue

MS = 1_000_000


def request(responses: list[InferResponse] | None = None, **fields: int) -> InferRequest:
    return InferRequest("m", {}, (responses if responses is not None else []).append, **fields)  # type: ignore[arg-type]


def waiting(queue: RequestQueue, now: int = 0) -> list[InferRequest]:
    return [one.request for one in queue.in_order(now)]


def test_first_come_first_served() -> None:
    queue = RequestQueue()
    requests = [request() for _ in range(3)]
    for one in requests:
        queue.add(one, 0)
    assert waiting(queue) == requests


def test_higher_priority_goes_first_and_unknown_ones_get_the_default() -> None:
    queue = RequestQueue(levels=3, default_level=2)
    low, high, none, beyond = request(priority=3), request(priority=1), request(), request(priority=9)
    for one in (low, high, none, beyond):
        queue.add(one, 0)
    assert waiting(queue) == [high, none, beyond, low]


def test_default_level_of_a_queue_without_levels_is_of_no_consequence() -> None:
    queue = RequestQueue(levels=0, default_level=2)
    requests = [request(), request(priority=2)]
    for one in requests:
        queue.add(one, 0)
    assert waiting(queue) == requests


def test_policies_of_levels_count_only_where_there_are_levels() -> None:
    queue = RequestQueue(levels=0, level_policies={1: QueuePolicy(max_queue_size=1)})
    for _ in range(2):
        queue.add(request(), 0)
    assert len(queue) == 2


def test_levels_are_as_many_as_are_used() -> None:
    queue = RequestQueue(levels=2**64 - 1, default_level=2**63)
    last, none, first = request(priority=2**64 - 1), request(), request(priority=1)
    for one in (last, none, first):
        queue.add(one, 0)
    assert waiting(queue) == [first, none, last]
    gone = [request(priority=priority) for priority in range(2, 50)]
    for one in gone:
        queue.add(one, 0)
        one.cancel()
    assert queue.take([*queue.in_order(0)]) == [first, none, last]
    assert waiting(queue) == []
    assert queue.levels == [2**63]


def test_full_level_refuses_at_once_and_others_stay_open() -> None:
    queue = RequestQueue(levels=2, default_level=1, level_policies={1: QueuePolicy(max_queue_size=1)})
    queue.add(request(priority=1), 0)
    with pytest.raises(ConchError, match="Exceeds maximum queue size") as error:
        queue.add(request(priority=1), 0)
    assert error.value.code is Code.UNAVAILABLE
    queue.add(request(priority=2), 0)


def test_limit_bounds_a_queue_without_policy() -> None:
    queue = RequestQueue(limit=2)
    queue.add(request(), 0)
    queue.add(request(), 0)
    with pytest.raises(ConchError, match=r"\[request id: <id_unknown>\] Exceeds maximum queue size"):
        queue.add(request(), 0)


def test_late_request_is_refused_before_it_runs() -> None:
    queue = RequestQueue(QueuePolicy(default_timeout_us=1000))
    responses: list[InferResponse] = []
    queue.add(request(responses), 0)
    later = request()
    queue.add(later, MS)
    assert waiting(queue, 1 * MS) == [later]
    assert responses[0].error is not None
    assert responses[0].error.status == "Unavailable: Request timeout expired"
    assert len(queue) == 1


def test_late_request_is_set_back_where_the_policy_delays() -> None:
    queue = RequestQueue(QueuePolicy(default_timeout_us=1000, delay_when_late=True))
    late, timely = request(), request()
    queue.add(late, 0)
    queue.add(timely, MS)
    assert waiting(queue, MS) == [timely, late]
    assert queue.take([*queue.in_order(MS)]) == [timely, late]
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("allowed", "default", "asked", "deadline"),
    [
        (True, 1000, 500, 500),
        (True, 1000, 5000, 1000),
        (False, 1000, 500, 1000),
        (True, 1000, 0, 1000),
        (True, 0, 500, 0),
    ],
)
def test_request_may_shorten_the_timeout_where_allowed(allowed: bool, default: int, asked: int, deadline: int) -> None:
    policy = QueuePolicy(default_timeout_us=default, allow_timeout_override=allowed)
    assert policy.deadline(request(timeout=asked), 0) == deadline * 1000


@pytest.mark.parametrize(
    ("policy", "timeout", "expires"),
    [
        (QueuePolicy(allow_timeout_override=True, default_timeout_us=1000), 500, 507),
        (QueuePolicy(allow_timeout_override=True, default_timeout_us=100), 500, 507),
        (QueuePolicy(allow_timeout_override=True, default_timeout_us=100), 0, 0),
        (QueuePolicy(allow_timeout_override=True), 500, 0),
        (QueuePolicy(default_timeout_us=100), 500, 0),
        (QueuePolicy(allow_timeout_override=True, default_timeout_us=100, delay_when_late=True), 500, 0),
    ],
)
def test_time_of_the_client_continues_while_its_request_runs(policy: QueuePolicy, timeout: int, expires: int) -> None:
    queue = RequestQueue(policy)
    one = request(timeout=timeout)
    queue.add(one, 7000)
    assert one.deadline == expires * 1000


def test_cancelled_request_never_runs_and_ends_once() -> None:
    queue = RequestQueue()
    responses: list[InferResponse] = []
    gone, stays = request(responses), request()
    queue.add(gone, 0)
    queue.add(stays, 0)
    gone.cancel()
    gone.cancel()
    assert [response.error.code for response in responses if response.error] == [Code.CANCELLED]
    assert waiting(queue) == [stays]
    assert len(queue) == 1


def test_request_that_was_taken_is_not_the_queues_to_cancel() -> None:
    queue = RequestQueue()
    responses: list[InferResponse] = []
    one = request(responses)
    queue.add(one, 0)
    queue.take([next(queue.in_order(0))])
    one.cancel()
    assert responses == []


def test_next_deadline_is_the_earliest() -> None:
    queue = RequestQueue(QueuePolicy(default_timeout_us=20, allow_timeout_override=True))
    assert queue.next_deadline() == 0
    queue.add(request(timeout=9), 0)
    queue.add(request(timeout=4), 0)
    queue.add(request(), 0)
    assert queue.next_deadline() == 4000


def test_drain_returns_what_still_waits() -> None:
    queue = RequestQueue(levels=2, default_level=1)
    first, gone, second = request(priority=2), request(), request()
    for one in (first, gone, second):
        queue.add(one, 0)
    gone.cancel()
    assert queue.drain() == [second, first]
    assert len(queue) == 0
