"""Requests that are prepared while they wait, and workers with several threads."""

from collections.abc import Sequence

import pytest

from conch.core.inference import InferRequest
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.schedulers.queue import RequestQueue
from conch.server.schedulers.tokens import TokenBatcher
from conch.telemetry.statistics import ModelStatistics
from tests.unit.fake_clock import settle
from tests.unit.server.fakes import Answers, FakeWorker, make_request


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent to a worker without being collected first."""
    monkeypatch.setattr("conch.server.execution.dispatch.PREPARE_SECONDS", 0.0)


class PreparingWorker(FakeWorker):
    """A worker that notes what it is asked to prepare; ``count`` tells lengths when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[list[InferRequest]] = []

    def prepare(self, requests: Sequence[InferRequest]) -> None:
        self.prepared.append(list(requests))

    def count(self, *lengths: int) -> None:
        for request, length in zip([one for some in self.prepared for one in some], lengths, strict=True):
            request.length, request.sequences = length, 1


class Bench:
    """A dispatcher that batches by tokens over one fake worker with ``count`` threads."""

    def __init__(self, count: int = 1) -> None:
        self.statistics = ModelStatistics("m", 1)
        scheduler = TokenBatcher(RequestQueue(), max_batch_size=8, max_batch_tokens=256)
        self.dispatcher = Dispatcher(scheduler, self.statistics, prepares=True)
        self.worker = PreparingWorker()
        self.instance = SupervisedWorker(WorkerPlacement("m_0", "CPU", count=count), self.launch, self.dispatcher)
        self.dispatcher.add(self.instance)
        self.instance.adopt(self.worker)  # type: ignore[arg-type]

    async def launch(self, placement: WorkerPlacement) -> PreparingWorker:
        self.worker = PreparingWorker()
        return self.worker

    def submit(self) -> Answers:
        answers = Answers()
        self.dispatcher.submit(make_request(answers))
        return answers

    @property
    def running(self) -> list[int]:
        return [len(batch.requests) for batch in self.worker.batches]


async def test_a_request_that_need_not_wait_is_not_prepared() -> None:
    bench = Bench()
    bench.submit()
    await settle()
    assert bench.running == [1]
    assert bench.worker.prepared == []


async def test_requests_that_wait_are_prepared_once_and_together() -> None:
    bench = Bench()
    bench.submit()
    await settle()
    bench.submit()
    bench.submit()
    await settle()
    assert [len(some) for some in bench.worker.prepared] == [2]


async def test_what_waits_is_batched_by_the_lengths_that_the_worker_told() -> None:
    bench = Bench()
    bench.submit()
    await settle()
    for _ in range(3):
        bench.submit()
    await settle()
    bench.worker.count(8, 200, 9)
    bench.worker.finish_batch()
    await settle()
    assert bench.running == [2]


async def test_a_request_that_ended_before_its_turn_to_be_prepared_is_left_out() -> None:
    bench = Bench()
    bench.submit()
    await settle()
    gone = make_request()
    bench.dispatcher.submit(gone)
    gone.cancel()
    bench.submit()
    await settle()
    assert [len(some) for some in bench.worker.prepared] == [1]


async def test_a_worker_gets_as_many_batches_as_it_has_threads() -> None:
    bench = Bench(count=2)
    for _ in range(3):
        bench.submit()
        await settle()
    assert bench.running == [1, 1]
    bench.worker.finish_batch()
    await settle()
    assert bench.running == [1, 1]


async def test_after_its_worker_died_an_instance_takes_no_more_than_before(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("conch.server.execution.worker.BACK_OFF", (0.0,))
    bench = Bench(count=2)
    bench.submit()
    await settle()
    bench.worker.die()
    for _ in range(3):
        await settle()
    for _ in range(4):
        bench.submit()
        await settle()
    assert bench.running == [1, 1]


async def test_work_of_an_execution_is_counted() -> None:
    bench = Bench()
    bench.submit()
    await settle()
    bench.worker.batches[0].work = {"tokens": 5, "padded": 8, "sequences": 1, "runs": 1, "prepare_ns": 1000}
    bench.worker.finish_batch()
    work = bench.statistics.work
    assert work is not None
    assert (work.tokens, work.padded, work.sequences, work.runs) == (5, 8, 1, 1)
    assert work.tokens_per_execution.cumulative()[0] == 1
