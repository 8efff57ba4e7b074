"""Arrivals, cancellations, timeouts and deaths of workers in any order: every request is accounted for after each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.core.errors import Code, ConchError, internal
from conch.core.inference import InferRequest, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.server.execution import dispatch
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.schedulers.batching import DynamicBatcher, HeldScheduler
from conch.server.schedulers.ordering import InOrder
from conch.server.schedulers.queue import QueuePolicy, RequestQueue
from conch.telemetry.statistics import ModelStatistics
from tests.unit.fake_clock import FakeClockLoop, settle
from tests.unit.server.fakes import Answers, FakeWorker

MAX = 4
LIMIT = 10
SIGNATURE = ModelSignature(
    "m", 1, MAX, {"x": TensorSpec("x", "FP32", (-1,)), "y": TensorSpec("y", "FP32", (1,), optional=True)}, {}
)
POLICIES = st.builds(
    QueuePolicy,
    max_queue_size=st.sampled_from([0, 3]),
    default_timeout_us=st.sampled_from([0, 700]),
    allow_timeout_override=st.booleans(),
    delay_when_late=st.booleans(),
)


@dataclass(frozen=True)
class Setup:
    """How the model is configured; ``held`` requests have to wait before any runs."""

    preferred: tuple[int, ...]
    delay: int
    policies: tuple[QueuePolicy, QueuePolicy]
    levels: int
    ordered: bool
    held: int
    workers: int


SETUPS = st.builds(
    Setup,
    preferred=st.sampled_from([(), (2,), (3,), (2, 4)]),
    delay=st.sampled_from([0, 500]),
    policies=st.tuples(POLICIES, POLICIES),
    levels=st.sampled_from([0, 2]),
    ordered=st.booleans(),
    held=st.sampled_from([0, 0, 3]),
    workers=st.integers(1, 2),
)
ARRIVALS = st.fixed_dictionaries(
    {
        "rows": st.integers(1, MAX),
        "priority": st.integers(0, 3),
        "timeout": st.sampled_from([0, 300]),
        "width": st.sampled_from([1, 1, 1, 2]),
        "optional": st.sampled_from([False, False, False, True]),
    }
)
EVENTS = st.one_of(
    *[st.tuples(st.just("arrive"), ARRIVALS)] * 4,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("cannot start"), st.integers(1, 2)),
    st.tuples(st.just("wait"), st.sampled_from([100, 400, 1_000, 600_000])),
)


class Town:
    """A dispatcher, its workers, and all requests that it was given."""

    def __init__(self, setup: Setup) -> None:
        levels = {1: setup.policies[0]} if setup.levels else None
        self.setup = setup
        self.queue = RequestQueue(
            setup.policies[1], levels=setup.levels, default_level=2, level_policies=levels, limit=LIMIT
        )
        batcher = DynamicBatcher(self.queue, SIGNATURE, preferred=setup.preferred, max_delay_us=setup.delay)
        scheduler = HeldScheduler(batcher, setup.held) if setup.held else batcher
        self.dispatcher = Dispatcher(scheduler, ModelStatistics("m", 1))
        self.order = InOrder() if setup.ordered else None
        self.failures = 0  # how many of the next starts fail
        self.workers: list[FakeWorker] = []
        self.accepted: list[tuple[InferRequest, Answers]] = []
        self.refused: list[Answers] = []
        for number in range(setup.workers):
            worker = FakeWorker(f"m_{number}")
            self.workers.append(worker)
            placement = WorkerPlacement(worker.name, "CPU")
            supervised = SupervisedWorker(placement, self.launch, self.dispatcher)  # type: ignore[arg-type]
            self.dispatcher.add(supervised)
            supervised.adopt(worker)  # type: ignore[arg-type]

    async def launch(self, placement: WorkerPlacement) -> FakeWorker:
        if self.failures:
            self.failures -= 1
            raise internal("no memory")
        worker = FakeWorker(placement.name)
        self.workers.append(worker)
        return worker

    def arrive(self, *, rows: int, priority: int, timeout: int, width: int, optional: bool) -> None:
        inputs = {"x": WireTensor("x", "FP32", (rows, width), bytes(4 * rows * width))}
        if optional:
            inputs["y"] = WireTensor("y", "FP32", (rows, 1), bytes(4 * rows))
        answers = Answers()
        request = InferRequest("m", inputs, answers, priority=priority, timeout=timeout)
        request.batch_size = rows
        full = self.full(priority)
        try:
            self.dispatcher.submit(request)
        except ConchError as error:
            assert error.code is Code.INTERNAL or full
            self.refused.append(answers)
        else:
            assert not full
            if self.order is not None:
                self.order.admit(request)
            self.accepted.append((request, answers))

    def full(self, priority: int) -> bool:
        """Whether a request of this priority finds no place."""
        setup = self.setup
        level = (priority if 1 <= priority <= setup.levels else 2) if setup.levels else 1
        limit = setup.policies[0 if setup.levels and level == 1 else 1].max_queue_size
        waiting = [request.priority for request in self.waiting()]
        return len(waiting) >= LIMIT or (bool(limit) and waiting.count(level) >= limit)

    def waiting(self) -> list[InferRequest]:
        """Those that neither run nor have ended."""
        running = {id(request) for worker in self.workers for batch in worker.batches for request in batch.requests}
        return [one for one, _ in self.accepted if not one.finished and id(one) not in running]

    async def play(self, kind: str, what: Any) -> None:
        busy = [worker for worker in self.workers if worker.alive and worker.batches]
        alive = [worker for worker in self.workers if worker.alive]
        match kind:
            case "arrive":
                self.arrive(**what)
            case "cancel" if self.accepted:
                self.accepted[what % len(self.accepted)][0].cancel()
            case "finish" if busy:
                busy[what % len(busy)].finish_batch()
            case "die" if alive:
                alive[what % len(alive)].die()
            case "cannot start":
                self.failures = what
            case "wait":
                await asyncio.sleep(what / 1e6)
        await settle()

    def check(self) -> None:
        """Each request waits, runs or has ended; batches are such as one execution can take."""
        running = [request for worker in self.workers for batch in worker.batches for request in batch.requests]
        assert len(set(map(id, running))) == len(running), "no request runs twice"
        assert not any(request.finished for request in running)
        assert all(answers.finals <= request.finished for request, answers in self.accepted)
        assert len(self.queue) == len(self.waiting())
        assert not any(answers.responses for answers in self.refused)
        for worker in self.workers:
            for batch in worker.batches:
                assert sum(request.batch_size for request in batch.requests) <= MAX
                assert len({request.inputs["x"].shape[1] for request in batch.requests}) == 1
                assert len({"y" in request.inputs for request in batch.requests}) == 1

    async def finish(self, held: int) -> None:
        """Let everything end that can."""
        self.failures = 0
        for _ in range(held):
            self.arrive(rows=1, priority=0, timeout=0, width=1, optional=False)
        for _ in range(60):
            await asyncio.sleep(1)
            for worker in self.workers:
                while worker.alive and worker.batches:
                    worker.finish_batch()
            if all(request.finished for request, _ in self.accepted):
                break
        self.check()
        assert [answers.finals for _, answers in self.accepted] == [1] * len(self.accepted), "every request ends once"
        await self.dispatcher.stop(0)


@settings(max_examples=150, deadline=None)
@given(SETUPS, st.lists(EVENTS, min_size=20, max_size=50))
def test_every_request_is_accounted_for(setup: Setup, events: list[tuple[str, Any]]) -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        patch.setattr(dispatch, "monotonic_ns", lambda: 1 + int(loop.time() * 1e9))
        town = Town(setup)
        for kind, what in events:
            await town.play(kind, what)
            town.check()
        await town.finish(setup.held)

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        runner.run(play())
