"""When the dynamic batcher runs what, with the time passed in."""

from conch.core.inference import InferRequest, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.server.schedulers.batching import DirectScheduler, DynamicBatcher, HeldScheduler
from conch.server.schedulers.queue import QueuePolicy, RequestQueue

US = 1000


def signature(max_batch_size: int = 8, **inputs: TensorSpec) -> ModelSignature:
    return ModelSignature("m", 1, max_batch_size, inputs, {})


def batcher(max_batch_size: int = 8, preferred: tuple[int, ...] = (8,), delay: int = 0, **inputs: TensorSpec):
    return DynamicBatcher(RequestQueue(), signature(max_batch_size, **inputs), preferred=preferred, max_delay_us=delay)


def add(scheduler: DynamicBatcher, count: int = 1, size: int = 1, now: int = 0, **shapes: tuple[int, ...]):
    requests = []
    for _ in range(count):
        request = InferRequest(
            "m", {name: WireTensor(name, "FP32", shape, b"") for name, shape in shapes.items()}, print
        )
        request.batch_size = size
        scheduler.queue.add(request, now)
        requests.append(request)
    return requests


def test_direct_scheduler_runs_one_request_at_a_time() -> None:
    scheduler = DirectScheduler(RequestQueue())
    first, second = add(scheduler, 2)
    assert scheduler.take(0).batch == [first]
    assert scheduler.take(0).batch == [second]
    assert scheduler.take(0).batch == []


def test_without_delay_a_batch_is_whatever_waits() -> None:
    scheduler = batcher()
    requests = add(scheduler, 3)
    assert scheduler.take(0).batch == requests


def test_batch_never_exceeds_the_maximum() -> None:
    scheduler = batcher(max_batch_size=8)
    requests = add(scheduler, 3, size=3)
    assert scheduler.take(0).batch == requests[:2]
    assert scheduler.take(0).batch == requests[2:]


def test_with_delay_an_incomplete_batch_waits_for_the_rest_of_it() -> None:
    scheduler = batcher(delay=300)
    add(scheduler, 2, now=1000 * US)
    taken = scheduler.take(1100 * US)
    assert taken.batch == []
    assert taken.wake_at == 1300 * US
    assert len(scheduler.take(1300 * US).batch) == 2


def test_preferred_size_runs_without_waiting() -> None:
    scheduler = batcher(preferred=(4, 8), delay=300)
    requests = add(scheduler, 5)
    assert scheduler.take(0).batch == requests[:4]
    assert scheduler.take(0).batch == []


def test_preferred_prefix_runs_also_without_delay() -> None:
    scheduler = batcher(preferred=(4, 8))
    requests = add(scheduler, 6)
    assert scheduler.take(0).batch == requests[:4]
    assert scheduler.take(0).batch == requests[4:]


def test_largest_preferred_size_that_waits_runs() -> None:
    scheduler = batcher(preferred=(2, 4), delay=300)
    requests = add(scheduler, 5)
    assert scheduler.take(0).batch == requests[:4]


def test_request_beyond_the_preferred_size_sends_those_before_it_and_waits_with_its_own_delay() -> None:
    scheduler = batcher(preferred=(4,), delay=300)
    before = add(scheduler, 3)
    beyond = add(scheduler, size=2, now=100 * US)
    assert scheduler.take(100 * US).batch == before
    taken = scheduler.take(100 * US)
    assert (taken.batch, taken.wake_at) == ([], 400 * US)
    assert scheduler.take(400 * US).batch == beyond


def test_overdue_batch_passes_the_preferred_size_that_it_reached() -> None:
    scheduler = batcher(preferred=(4,), delay=300)
    requests = add(scheduler, 6)
    assert scheduler.take(300 * US).batch == requests


def test_overdue_batch_never_exceeds_the_maximum() -> None:
    scheduler = batcher(max_batch_size=4, preferred=(2,), delay=300)
    requests = add(scheduler, 6)
    assert scheduler.take(300 * US).batch == requests[:4]


def test_overdue_requests_take_everything_along() -> None:
    scheduler = batcher(preferred=(4, 8), delay=300)
    requests = add(scheduler, 6)
    assert scheduler.take(300 * US).batch == requests


def test_delay_counts_from_the_oldest_request() -> None:
    scheduler = batcher(delay=300)
    add(scheduler, now=0)
    add(scheduler, now=200 * US)
    assert scheduler.take(250 * US).wake_at == 300 * US


def test_waiting_ends_early_for_a_deadline() -> None:
    queue = RequestQueue(QueuePolicy(default_timeout_us=100))
    scheduler = DynamicBatcher(queue, signature(), preferred=(8,), max_delay_us=300)
    add(scheduler)
    assert scheduler.take(0).wake_at == 100 * US


def test_different_variable_dimensions_close_the_batch() -> None:
    scheduler = batcher(x=TensorSpec("x", "FP32", (-1,)))
    first = add(scheduler, 2, x=(1, 16))
    other = add(scheduler, x=(1, 17))
    assert scheduler.take(0).batch == first
    assert scheduler.take(0).batch == other


def test_ragged_inputs_share_a_batch() -> None:
    scheduler = batcher(x=TensorSpec("x", "FP32", (-1,), ragged=True))
    requests = add(scheduler, x=(1, 16)) + add(scheduler, x=(1, 17))
    assert scheduler.take(0).batch == requests


def test_closed_batch_does_not_wait_for_its_delay() -> None:
    scheduler = batcher(delay=300, x=TensorSpec("x", "FP32", (-1,)))
    first = add(scheduler, x=(1, 16))
    add(scheduler, x=(1, 17))
    assert scheduler.take(0).batch == first


def test_different_optional_inputs_close_the_batch() -> None:
    scheduler = batcher(x=TensorSpec("x", "FP32", (1,)), y=TensorSpec("y", "FP32", (1,), optional=True))
    with_y = add(scheduler, x=(1, 1), y=(1, 1))
    without = add(scheduler, x=(1, 1))
    assert scheduler.take(0).batch == with_y
    assert scheduler.take(0).batch == without


def test_request_larger_than_the_preferred_size_runs_alone() -> None:
    scheduler = batcher(max_batch_size=8, preferred=(2,))
    requests = add(scheduler, 2, size=5)
    assert scheduler.take(0).batch == requests[:1]


def test_held_scheduler_begins_once_enough_wait_and_then_never_holds_again() -> None:
    inner = batcher()
    scheduler = HeldScheduler(inner, 3)
    first = add(inner, 2)
    assert scheduler.take(0).batch == []
    first += add(inner)
    assert scheduler.take(0).batch == first
    later = add(inner)
    assert scheduler.take(0).batch == later
