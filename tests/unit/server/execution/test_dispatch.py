"""Requests and instances brought together, with workers that finish when the test says."""

import asyncio

import pytest

from conch.core.errors import Code, ConchError, internal, invalid
from conch.core.inference import ModelSignature
from conch.server.execution import worker as instance_module
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.schedulers.batching import DirectScheduler, DynamicBatcher
from conch.server.schedulers.queue import RequestQueue
from conch.server.schedulers.tokens import TokenBatcher
from conch.telemetry.statistics import ModelStatistics
from conch.workers.child.buffers import BufferMap
from conch.workers.child.packing import Unpacker
from tests.unit.fake_clock import settle
from tests.unit.server.fakes import Answers, FakeWorker, make_request


class Bench:
    """A dispatcher over a number of fake workers."""

    def __init__(self, count: int = 1, limit: int = 0, delay: int = 0) -> None:
        signature = ModelSignature("m", 1, 4, {}, {})
        self.statistics = ModelStatistics("m", 1)
        scheduler = DynamicBatcher(RequestQueue(limit=limit), signature, preferred=(4,), max_delay_us=delay)
        self.dispatcher = Dispatcher(scheduler, self.statistics)
        self.launches: list[FakeWorker | ConchError] = []
        self.workers = [FakeWorker(f"m_{number}") for number in range(count)]
        for worker in self.workers:
            self.add(worker)

    def add(self, worker: FakeWorker) -> None:
        instance = SupervisedWorker(WorkerPlacement(worker.name, "CPU"), self.launch, self.dispatcher)  # type: ignore[arg-type]
        self.dispatcher.add(instance)
        instance.adopt(worker)  # type: ignore[arg-type]

    async def launch(self, placement: WorkerPlacement) -> FakeWorker:
        result = self.launches.pop(0)
        if isinstance(result, ConchError):
            raise result
        return result

    def submit(self, count: int = 1) -> list[Answers]:
        answers = [Answers() for _ in range(count)]
        for answer in answers:
            self.dispatcher.submit(make_request(answer))
        return answers


async def test_requests_of_one_round_share_a_batch() -> None:
    bench = Bench()
    bench.submit(3)
    await settle()
    assert [len(batch.requests) for batch in bench.workers[0].batches] == [3]
    assert len(bench.statistics.queue) == 0


async def test_next_batch_goes_to_the_worker_before_the_answers_go_out() -> None:
    bench = Bench()
    first = bench.submit(4)
    await settle()
    bench.submit(2)
    await settle()
    assert len(bench.statistics.queue) == 2
    bench.workers[0].finish_batch()
    assert [len(batch.requests) for batch in bench.workers[0].batches] == [2]
    assert [one.finals for one in first] == [1] * 4


async def test_free_instances_take_batches_side_by_side() -> None:
    bench = Bench(count=2)
    bench.submit(8)
    await settle()
    assert [len(worker.batches) for worker in bench.workers] == [1, 1]


async def test_incomplete_batch_runs_after_its_delay() -> None:
    bench = Bench(delay=1000)
    bench.submit()
    await settle()
    assert bench.workers[0].batches == []
    async with asyncio.timeout(60):
        while not bench.workers[0].batches:
            await asyncio.sleep(0.001)


async def test_full_queue_refuses_at_once() -> None:
    bench = Bench(limit=2)
    bench.submit(2)
    with pytest.raises(ConchError) as refused:
        bench.submit()
    assert refused.value.code is Code.UNAVAILABLE


async def test_cancelled_while_waiting_never_runs_and_the_others_do() -> None:
    bench = Bench()
    gone, stays = Answers(), Answers()
    request = make_request(gone)
    bench.dispatcher.submit(request)
    bench.dispatcher.submit(make_request(stays))
    request.cancel()
    await settle()
    assert [len(batch.requests) for batch in bench.workers[0].batches] == [1]
    bench.workers[0].finish_batch()
    assert (gone.error is not None and gone.error.code, stays.error) == (Code.CANCELLED, None)


async def test_dead_worker_fails_only_what_it_ran_and_the_next_one_takes_the_rest() -> None:
    bench = Bench()
    running = bench.submit(4)
    await settle()
    waiting = bench.submit(2)
    bench.launches.append(replacement := FakeWorker("m_0"))
    bench.workers[0].die()
    assert not bench.dispatcher.ready
    assert [one.error.message for one in running if one.error] == ["Stub process 'm_0' is not healthy."] * 4
    await settle()
    assert bench.dispatcher.ready
    replacement.finish_batch()
    assert [(one.finals, one.error) for one in waiting] == [(1, None)] * 2


async def test_worker_that_cannot_come_back_fails_what_waits_and_refuses_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(instance_module, "BACK_OFF", (0.0, 0.0))
    bench = Bench()
    bench.launches += [internal("no"), FakeWorker("m_0")]
    waiting = bench.submit()
    bench.workers[0].die()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    while waiting[0].error is None:
        await asyncio.sleep(0)
    with pytest.raises(ConchError, match="is not healthy"):
        bench.submit()
    while not bench.dispatcher.ready:
        await asyncio.sleep(0)
    bench.submit()


async def test_other_instances_continue_when_one_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(instance_module, "BACK_OFF", (0.0, 60.0))
    bench = Bench(count=2)
    bench.launches.append(internal("no"))
    bench.workers[0].die()
    await settle()
    answers = bench.submit()
    await settle()
    bench.workers[1].finish_batch()
    assert (answers[0].finals, answers[0].error) == (1, None)
    await bench.dispatcher.stop(0)


@pytest.mark.parametrize("by_force", [False, True])
async def test_end_fails_what_still_waits(by_force: bool) -> None:
    bench = Bench()
    bench.submit(4)
    await settle()
    waiting = bench.submit()
    if by_force:
        bench.dispatcher.abandon()
    else:
        await bench.dispatcher.stop(0)
    assert waiting[0].error is not None and waiting[0].error.code is Code.UNAVAILABLE


async def test_instances_that_are_not_kept_end_and_the_others_stay() -> None:
    bench = Bench(count=2)
    bench.dispatcher.keep([WorkerPlacement("m_1", "CPU")])
    await settle()
    assert [worker.stopped for worker in bench.workers] == [True, False]
    bench.submit()
    await settle()
    assert len(bench.workers[1].batches) == 1


async def test_a_change_of_instances_lasts_until_those_that_go_have_finished_and_finalized() -> None:
    bench = Bench(count=2)
    idle, finalized = asyncio.Event(), asyncio.Event()
    going = bench.workers[0]
    going.finish = idle.wait  # type: ignore[method-assign,assignment]
    stop = going.stop

    async def stop_later(seconds: float) -> None:
        await finalized.wait()
        await stop(seconds)

    going.stop = stop_later  # type: ignore[method-assign]
    bench.dispatcher.keep([WorkerPlacement("m_1", "CPU")])
    change = asyncio.create_task(bench.dispatcher.finish_retiring())
    for event in (idle, finalized):
        await settle()
        assert not change.done()
        event.set()
    await change
    assert going.stopped


async def test_execution_is_counted_with_its_batch_size() -> None:
    bench = Bench()
    bench.submit(3)
    await settle()
    bench.workers[0].finish_batch()
    assert bench.statistics.execution_count == 1
    assert list(bench.statistics.batches) == [3]


async def test_request_of_no_iterative_sequence_that_is_rescheduled_fails_and_the_rest_is_answered() -> None:
    bench = Bench()
    again, other = bench.submit(2)
    await settle()
    (worker,) = bench.workers
    worker.batches[0].rescheduled = worker.batches[0].requests[:1]
    worker.finish_batch()
    assert again.error is not None
    assert again.error.message.startswith("Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while")
    assert (other.error, other.finals) == (None, 1)
    bench.submit()
    await settle()
    assert len(worker.batches) == 1


async def test_model_that_says_so_is_not_ready_and_answers_all_the_same() -> None:
    bench = Bench(2)
    worker = bench.workers[1]
    assert bench.dispatcher.ready
    for number, ready in enumerate((False, True), 1):
        assert worker.calls.handle({"op": "model_ready", "ready": ready}, Unpacker(b"", BufferMap()))
        assert bench.dispatcher.ready is ready
        bench.submit()
        await settle()
        assert len(worker.batches) + len(bench.workers[0].batches) == number


async def test_a_worker_that_generates_takes_as_many_requests_as_it_has_slots() -> None:
    bench = Bench(count=0)
    bench.dispatcher = Dispatcher(DirectScheduler(RequestQueue()), bench.statistics)
    worker = FakeWorker()
    worker.slots = 2
    bench.workers.append(worker)
    bench.add(worker)
    bench.submit(3)
    await settle()
    assert [len(batch.requests) for batch in worker.batches] == [1, 1]
    worker.finish_batch()
    await settle()
    assert len(worker.batches) == 2
    assert len(bench.statistics.queue) == 0


async def test_what_a_worker_generates_is_forgotten_with_it() -> None:
    bench = Bench()
    bench.launches = [internal("no memory")] * 3
    load = {
        "running": 2,
        "waiting": 0,
        "used": 7,
        "capacity": 9,
        "bytes": 28,
        "prompt": 3,
        "generated": 4,
        "preempted": 0,
    }
    load |= {"queries": 0, "hits": 0, "first": [], "gaps": [], "ended": []}
    bench.dispatcher.on_progress(bench.workers[0].pid, load)
    assert bench.statistics.snapshot()["generation"]["running"] == 2
    bench.workers[0].die()
    assert bench.statistics.snapshot()["generation"]["running"] == 0
    await bench.dispatcher.stop(0)


async def test_a_large_request_does_not_hold_up_a_short_one_for_more_than_a_batch() -> None:
    """The worker is an engine that computes 10 pairs in a batch and counts its batches."""
    statistics = ModelStatistics("m", 1)
    scheduler = TokenBatcher(RequestQueue(), max_batch_size=1024, max_batch_tokens=1000)
    dispatcher = Dispatcher(scheduler, statistics, prepares=True)
    worker = FakeWorker()
    instance = SupervisedWorker(WorkerPlacement("m_0", "CPU"), None, dispatcher)  # type: ignore[arg-type]
    dispatcher.add(instance)
    instance.adopt(worker)  # type: ignore[arg-type]
    large, short = Answers(), Answers()
    request = make_request(large)
    request.length, request.sequences, request.batch_size = 100, 1000, 1000
    dispatcher.submit(request)
    batches = []
    for number in range(200):
        await settle()
        if number == 30:
            dispatcher.submit(make_request(short))
        if not worker.batches:
            break
        [execution] = worker.batches
        batches.append(list(execution.requests))
        left = 1000 - 10 * sum(request in batch for batch in batches)
        if request in execution.requests and left:
            execution.unfinished = [request]
        worker.finish_batch()
    assert len(batches) == 101
    assert [index for index, batch in enumerate(batches) if request not in batch] == [31]
    assert (large.finals, large.error, short.finals, short.error) == (1, None, 1, None)


async def test_a_worker_that_retires_completes_what_it_has_begun() -> None:
    statistics = ModelStatistics("m", 1)
    dispatcher = Dispatcher(
        TokenBatcher(RequestQueue(), max_batch_size=8, max_batch_tokens=100), statistics, prepares=True
    )
    worker, answers = FakeWorker(), Answers()
    instance = SupervisedWorker(WorkerPlacement("m_0", "CPU"), None, dispatcher)  # type: ignore[arg-type]
    dispatcher.add(instance)
    instance.adopt(worker)  # type: ignore[arg-type]
    dispatcher.submit(make_request(answers))
    await settle()
    [execution] = worker.batches
    dispatcher.keep(())
    execution.unfinished = execution.requests
    worker.finish_batch()
    await settle()
    assert not worker.stopped
    worker.finish_batch()
    assert (answers.finals, answers.error) == (1, None)
    await dispatcher.finish_retiring()
    assert worker.stopped


async def test_an_unfinished_request_continues_at_once_where_the_scheduler_forms_no_batches() -> None:
    dispatcher = Dispatcher(DirectScheduler(RequestQueue()), ModelStatistics("m", 1), prepares=True)
    worker, large, short = FakeWorker(), Answers(), Answers()
    instance = SupervisedWorker(WorkerPlacement("m_0", "CPU"), None, dispatcher)  # type: ignore[arg-type]
    dispatcher.add(instance)
    instance.adopt(worker)  # type: ignore[arg-type]
    first, second = make_request(large), make_request(short)
    dispatcher.submit(first)
    await settle()
    dispatcher.submit(second)
    await settle()
    [execution] = worker.batches
    execution.unfinished = [first]
    worker.finish_batch()
    [execution] = worker.batches
    assert list(execution.requests) == [first]
    worker.finish_batch()
    await settle()
    [execution] = worker.batches
    assert list(execution.requests) == [second]
    worker.finish_batch()
    assert (large.finals, large.error, short.finals, short.error) == (1, None, 1, None)


async def test_a_worker_that_has_ended_does_not_leave_an_adapter_in_others() -> None:
    bench = Bench(count=3)
    await bench.dispatcher.load_adapter("red", "a", False)
    assert [worker.adapters for worker in bench.workers] == [{"red": "a"}] * 3
    bench.workers[0].alive = False
    await bench.dispatcher.unload_adapter("red")
    assert [worker.adapters for worker in bench.workers[1:]] == [{}, {}]


@pytest.mark.parametrize("before", [{}, {"red": "a"}], ids=["new", "replaced"])
async def test_an_adapter_that_one_worker_refuses_is_undone_in_the_others(before: dict[str, str]) -> None:
    bench = Bench(count=3)
    for name, path in before.items():
        await bench.dispatcher.load_adapter(name, path, False)

    async def refuse(*_: object) -> None:
        bench.workers[0].alive = False
        raise invalid("refused")

    bench.workers[2].load_adapter = refuse  # type: ignore[method-assign]
    with pytest.raises(ConchError, match="refused"):
        await bench.dispatcher.load_adapter("red", "b", True)
    assert bench.workers[1].adapters == bench.workers[2].adapters == bench.dispatcher.adapters == before
