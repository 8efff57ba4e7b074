"""Sequences on workers that finish and die when the test says."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic_ns

import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import ModelSignature
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.schedulers.sequences.inputs import ControlInputs, StateKeeper
from conch.server.schedulers.sequences.scheduler import SequencePolicy, SequenceScheduler
from conch.telemetry.statistics import ModelStatistics
from tests.unit.fake_clock import settle
from tests.unit.server.fakes import Answers, FakeWorker, make_request
from tests.unit.server.schedulers.sequences.bench import CONTROLS, SECOND, batching

POLICY = SequencePolicy("m", max_batch_size=2, slots=2, max_idle=60 * SECOND)


class Bench:
    """A dispatcher over fake workers."""

    def __init__(self, count: int = 1, policy: SequencePolicy = POLICY) -> None:
        scheduler = SequenceScheduler(
            policy, ModelSignature("m", 1, 2, {}, {}), ControlInputs(batching(CONTROLS), batched=True), StateKeeper()
        )
        self.statistics = ModelStatistics("m", 1)
        self.dispatcher = Dispatcher(scheduler, self.statistics)
        self.workers: list[FakeWorker] = []
        self.launches = [FakeWorker("m_0")]
        for number in range(count):
            self.add(FakeWorker(f"m_{number}"))

    def add(self, worker: FakeWorker) -> None:
        self.workers.append(worker)
        supervised = SupervisedWorker(WorkerPlacement(worker.name, "CPU"), self.launch, self.dispatcher)  # type: ignore[arg-type]
        self.dispatcher.add(supervised)
        supervised.adopt(worker)  # type: ignore[arg-type]

    async def launch(self, placement: WorkerPlacement) -> FakeWorker:
        return self.launches.pop(0)

    async def send(self, sequence: int, marks: str = "") -> Answers:
        answers = Answers()
        flags = ("s" in marks) | ("e" in marks) << 1
        self.dispatcher.submit(make_request(answers, correlation_id=sequence, flags=flags))
        await settle()
        return answers

    def batches(self, worker: int = 0) -> list[list[int | str]]:
        return [[request.correlation_id for request in batch.requests] for batch in self.workers[worker].batches]


async def test_sequences_stay_with_their_workers() -> None:
    bench = Bench(2)
    await bench.send(1, "s")
    await bench.send(2, "s")
    assert [bench.batches(0), bench.batches(1)] == [[[1]], [[2]]]
    bench.workers[1].finish_batch()
    await bench.send(2)
    assert [bench.batches(0), bench.batches(1)] == [[[1]], [[2]]]


async def test_sequence_that_waits_when_its_version_is_replaced_gets_the_slot_of_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    for sequence in (1, 2, 3):
        await bench.send(sequence, "s")
    while bench.workers[0].batches:
        bench.workers[0].finish_batch()
        await settle()
    monkeypatch.setattr("conch.server.execution.dispatch.monotonic_ns", lambda: monotonic_ns() + 2 * SECOND)
    bench.dispatcher.retire()
    await settle()
    assert [3] in bench.batches()


async def test_rows_without_a_request_count_in_the_batch_and_nowhere_else() -> None:
    bench = Bench()
    await bench.send(1, "s")
    bench.workers[0].finish_batch()
    await bench.send(2, "s")
    assert bench.batches() == [[0, 2]]
    bench.workers[0].finish_batch()
    assert {size: batch.count for size, batch in bench.statistics.batches.items()} == {1: 1, 2: 1}


async def test_next_request_runs_when_the_answer_before_has_been_passed_on() -> None:
    bench = Bench()
    first = await bench.send(1, "s")
    await bench.send(1)
    assert len(bench.statistics.queue) == 1
    bench.workers[0].finish_batch()
    assert first.finals == 1 and bench.batches() == []
    await settle()
    assert bench.batches() == [[1]]


async def test_worker_that_dies_takes_its_sequences_along_and_is_replaced() -> None:
    bench = Bench(2)
    running, other = await bench.send(1, "s"), await bench.send(2, "s")
    waiting = await bench.send(1)
    bench.workers[0].die()
    await settle()
    assert [one.error.message if one.error else "" for one in (running, waiting, other)] == [
        "Stub process 'm_0' is not healthy.",
        "sequence 1 of model 'm' has ended: Stub process 'm_0' is not healthy.",
        "",
    ]
    with pytest.raises(ConchError, match="must specify the START flag"):
        await bench.send(1)
    await bench.send(3, "s")
    assert bench.launches == []
    bench.workers[1].finish_batch()
    await bench.send(2, "e")
    assert bench.batches(1) == [[2]]


async def test_backlog_moves_on_when_a_sequence_is_cancelled() -> None:
    bench = Bench(policy=replace(POLICY, slots=1))
    await bench.send(1, "s")
    answers = Answers()
    request = make_request(answers, correlation_id=1)
    bench.dispatcher.submit(request)
    await bench.send(2, "s")
    bench.workers[0].finish_batch()
    request.cancel()
    await settle()
    assert answers.error is not None and answers.error.code is Code.CANCELLED
    assert bench.batches() == [[2]]


async def test_instance_that_is_removed_ends_after_its_last_sequence() -> None:
    bench = Bench(2)
    await bench.send(1, "s")
    bench.workers[0].finish_batch()
    kept = [WorkerPlacement("m_1", "CPU")]
    bench.dispatcher.keep(kept)
    await settle()
    assert bench.dispatcher.placements() == kept and not bench.workers[0].stopped
    await bench.send(2, "s")
    await bench.send(1, "e")
    assert [bench.batches(0), bench.batches(1)] == [[[1]], [[2]]]
    bench.workers[0].finish_batch()
    await settle()
    assert bench.workers[0].stopped and not bench.workers[1].stopped


async def test_instance_that_comes_back_is_another_than_the_one_that_leaves() -> None:
    bench = Bench(2)
    await bench.send(1, "s")
    bench.workers[0].finish_batch()
    bench.dispatcher.keep([WorkerPlacement("m_1", "CPU")])
    bench.add(FakeWorker("m_0"))
    await bench.send(2, "s")
    await bench.send(3, "s")
    await bench.send(1, "e")
    assert [bench.batches(0), bench.batches(1), bench.batches(2)] == [[[1]], [[2]], [[3]]]
    bench.workers[0].finish_batch()
    await settle()
    assert [worker.stopped for worker in bench.workers] == [True, False, False]


async def test_leaving_worker_that_dies_ends_with_its_sequences() -> None:
    bench = Bench(2)
    lost = await bench.send(1, "s")
    bench.dispatcher.keep([WorkerPlacement("m_1", "CPU")])
    bench.workers[0].die()
    await settle()
    await bench.dispatcher.finish_retiring()
    assert lost.error is not None and bench.dispatcher.processes == bench.workers[1:]
    await bench.send(2, "s")
    assert bench.batches(1) == [[2]]


async def test_when_no_worker_can_be_had_everything_fails() -> None:
    bench = Bench()
    await bench.send(1, "s")
    waiting = await bench.send(1)
    bench.dispatcher.fail_waiting(ConchError("gone"))
    assert waiting.error is not None and waiting.error.message == "gone"
    assert bench.dispatcher.sequences == 0
