"""Which requests the token batcher runs together, with the time passed in."""

from conch.core.errors import internal
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.server.schedulers.queue import QueuePolicy, RequestQueue
from conch.server.schedulers.tokens import TokenBatcher

US = 1000


def batcher(queue: RequestQueue | None = None, size: int = 64, tokens: int = 1024, **options: int) -> TokenBatcher:
    queue = RequestQueue() if queue is None else queue
    return TokenBatcher(queue, max_batch_size=size, max_batch_tokens=tokens, **options)


def request(length: int = 0, rows: int = 1, text: bytes = b"", priority: int = 0) -> InferRequest:
    responses: list[InferResponse] = []
    one = InferRequest("m", {"text": WireTensor("text", "BYTES", (rows, 1), text)}, responses.append, priority=priority)
    one.length, one.sequences, one.batch_size = length, rows if length else 0, rows
    return one


def add(scheduler: TokenBatcher, *requests: InferRequest, now: int = 0) -> list[InferRequest]:
    for one in requests:
        scheduler.queue.add(one, now)
    return list(requests)


def test_an_empty_queue_gives_no_batch() -> None:
    assert batcher().take(0).batch == []


def test_requests_of_one_length_run_together_in_order() -> None:
    scheduler = batcher()
    requests = add(scheduler, *(request(16) for _ in range(5)))
    assert scheduler.take(0).batch == requests
    assert len(scheduler.queue) == 0


def test_the_oldest_request_runs_first_and_takes_its_likes_along() -> None:
    scheduler = batcher()
    long, short, other_long, other_short = add(scheduler, request(200), request(8), request(210), request(9))
    assert scheduler.take(0).batch == [long, other_long]
    assert scheduler.take(0).batch == [short, other_short]


def test_a_batch_stays_within_the_budget_of_tokens() -> None:
    scheduler = batcher(tokens=256)
    requests = add(scheduler, *(request(64) for _ in range(6)))
    assert scheduler.take(0).batch == requests[:4]
    assert scheduler.take(0).batch == requests[4:]


def test_a_request_beyond_the_budget_runs_alone() -> None:
    scheduler = batcher(tokens=256)
    requests = add(scheduler, request(400), request(400))
    assert scheduler.take(0).batch == requests[:1]


def test_rows_count_against_the_greatest_batch() -> None:
    scheduler = batcher(size=4)
    requests = add(scheduler, request(8, rows=3), request(8, rows=3))
    assert scheduler.take(0).batch == requests[:1]


def test_requests_that_have_not_been_counted_are_judged_by_their_size() -> None:
    scheduler = batcher()
    long, short = add(scheduler, request(text=b"x" * 1000), request(text=b"x" * 20))
    assert scheduler.take(0).batch == [long]
    assert scheduler.take(0).batch == [short]


def test_a_lower_priority_waits_for_all_of_the_higher_one() -> None:
    scheduler = batcher(RequestQueue(levels=2, default_level=2))
    low, high_long, high_short = add(scheduler, request(8), request(200, priority=1), request(8, priority=1))
    assert scheduler.take(0).batch == [high_long]
    assert scheduler.take(0).batch == [high_short]
    assert scheduler.take(0).batch == [low]


def test_with_a_delay_a_batch_that_could_grow_waits() -> None:
    scheduler = batcher(max_delay_us=500)
    requests = add(scheduler, request(8), now=100 * US)
    assert scheduler.take(200 * US).wake_at == 600 * US
    assert scheduler.take(600 * US).batch == requests


def test_with_a_delay_a_batch_runs_once_it_has_enough() -> None:
    scheduler = batcher(max_delay_us=500, minimum_rows=2)
    requests = add(scheduler, request(8), request(8))
    assert scheduler.take(0).batch == requests


def test_with_a_delay_a_batch_beside_which_others_wait_is_complete() -> None:
    scheduler = batcher(max_delay_us=500)
    long, _ = add(scheduler, request(200), request(8))
    assert scheduler.take(0).batch == [long]


def test_a_request_that_is_cancelled_while_it_waits_never_runs() -> None:
    scheduler = batcher()
    first, second = add(scheduler, request(8), request(8))
    first.cancel()
    assert scheduler.take(0).batch == [second]


def test_late_requests_are_refused() -> None:
    scheduler = batcher(RequestQueue(QueuePolicy(default_timeout_us=100)))
    late, timely = request(8), request(8)
    add(scheduler, late)
    add(scheduler, timely, now=150 * US)
    assert scheduler.take(200 * US).batch == [timely]
    assert late.finished


def test_what_was_taken_from_the_middle_can_no_longer_be_cancelled_in_the_queue() -> None:
    scheduler = batcher()
    _, middle, _ = add(scheduler, request(200), request(8), request(200))
    scheduler.take(0)
    assert scheduler.take(0).batch == [middle]
    assert middle.on_cancel is None
    assert len(scheduler.queue) == 0


class TestContinuing:
    """Requests that an instance ends without having completed them, because others wait."""

    def test_a_request_that_arrives_waits_for_one_batch_of_a_large_one(self) -> None:
        scheduler = batcher()
        [large] = add(scheduler, request(100, rows=64))
        assert scheduler.assign(("a",), 0).batch == [large]
        [short] = add(scheduler, request(5))
        scheduler.done("a", 0, [large])
        assert scheduler.assign(("a",), 0).batch == [short]
        [other] = add(scheduler, request(6))
        scheduler.done("a", 0)
        # Then it is the turn of the large one, however many arrive.
        assert scheduler.assign(("a",), 0).batch == [large]
        scheduler.done("a", 0, [large])
        assert scheduler.assign(("a",), 0).batch == [other]

    def test_without_waiting_requests_it_continues_at_once(self) -> None:
        scheduler = batcher()
        [large] = add(scheduler, request(100, rows=64))
        scheduler.assign(("a",), 0)
        scheduler.done("a", 0, [large])
        assert scheduler.eager(("a", "b")) == ["a"]
        assert scheduler.assign(("b",), 0).batch == []
        decision = scheduler.assign(("b", "a"), 0)
        assert (decision.batch, decision.instance) == ([large], "a")
        scheduler.done("a", 0)
        assert scheduler.assign(("a",), 0).batch == []

    def test_large_requests_take_turns(self) -> None:
        scheduler = batcher()
        one, two = add(scheduler, request(100, rows=64), request(100, rows=64))
        order = []
        for _ in range(6):
            order += scheduler.assign(("a",), 0).batch
            scheduler.done("a", 0, order[-1:])
        assert order == [one, two, one, two, one, two]

    def test_one_that_is_cancelled_meanwhile_ends_and_does_not_run_again(self) -> None:
        for cancels_first in (True, False):
            scheduler = batcher()
            [large] = add(scheduler, request(100, rows=64))
            scheduler.assign(("a",), 0)
            large.on_cancel = None  # as the worker leaves it
            if cancels_first:
                large.cancel()
            scheduler.done("a", 0, [large])
            large.cancel()
            assert large.finished
            assert scheduler.assign(("a",), 0).batch == []
            assert scheduler.retire("a")

    def test_an_instance_retires_after_what_it_continues_and_fails_it_when_it_dies(self) -> None:
        scheduler = batcher()
        [large] = add(scheduler, request(100, rows=64))
        scheduler.assign(("a",), 0)
        scheduler.done("a", 0, [large])
        assert (scheduler.retire("a"), scheduler.retire("b")) == (False, True)
        scheduler.lose("a", internal("dead"), 0)
        assert large.finished
        assert scheduler.retire("a")
