"""Models behind the response cache and the rate limiter, with all that may happen to their requests, in any order.

Two are batched dynamically, the others take sequences (by both strategies) and generate.

After each step every request is accounted for: it has ended once, or it waits, is being looked up, or runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from conch.config.pbtxt import parse
from conch.core.errors import ConchError
from conch.core.inference import InferRequest, ModelSignature
from conch.core.tensors import WireTensor
from conch.options.triton_values import Resource
from conch.server.caching.cache import CachedResponse
from conch.server.caching.local import LocalCache, LocalScope
from conch.server.execution import dispatch, worker
from conch.server.execution.caching import CacheLookup
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.starting import WorkerPlacement, placements_of
from conch.server.execution.worker import SupervisedWorker
from conch.server.model import Model
from conch.server.schedulers.batching import DirectScheduler, DynamicBatcher
from conch.server.schedulers.queue import QueuePolicy, RequestQueue
from conch.server.schedulers.rate_limiter import InstanceRateLimiter, ResourceKey
from conch.server.schedulers.sequences.inputs import ControlInputs, StateKeeper
from conch.server.schedulers.sequences.scheduler import SequencePolicy, SequenceScheduler
from conch.telemetry.statistics import ModelStatistics
from tests.unit.fake_clock import FakeClockLoop, settle
from tests.unit.server.fakes import Answers, FakeWorker

SIGNATURE = ModelSignature("m", 1, 4, {}, {})
#: What an instance of each model needs; there is one more than the most.
NEEDS = (2, 3, 2, 3, 2)
#: How many requests an engine takes at a time.
ENGINE_SLOTS = 2


def _config(name: str, need: int) -> str:
    return f"""
    name: "{name}" backend: "python" max_batch_size: 4
    input {{ name: "x" data_type: TYPE_UINT8 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}
    instance_group {{
      name: "{name}" count: 2 kind: KIND_CPU rate_limiter {{ resources {{ name: "R" count: {need} }} priority: {need} }}
    }}
    """


class SlowArea:
    """A cache that answers later, or at once."""

    def __init__(self, scope: LocalScope) -> None:
        self._scope = scope
        self.lookups: list[tuple[asyncio.Future[CachedResponse | None], bytes]] = []
        self.slow = False
        self.insert, self.forget = scope.insert, scope.forget

    def find(self, key: bytes) -> object:
        if not self.slow:
            return self._scope.find(key)
        future = asyncio.get_running_loop().create_future()
        self.lookups.append((future, key))
        return future

    def answer(self) -> None:
        for future, key in self.lookups:
            future.set_result(self._scope.find(key))
        self.lookups.clear()


class OneModel:
    """A model of two instances, whose workers die and come back as the test says."""

    per_worker = 1

    def __init__(self, name: str, need: int, limiter: InstanceRateLimiter) -> None:
        self.config = parse(_config(name, need), "x")
        self.need = need
        self.statistics = ModelStatistics(name, 1)
        self.dispatcher = self._dispatcher(limiter)
        assert self.statistics.queue is not None
        self.queue = self.statistics.queue
        self.workers: list[FakeWorker] = []
        self.model = self._model()
        placements = list(placements_of(self.config))
        assert self.dispatcher.resources is not None
        self.dispatcher.resources.reserve(self.config, placements)
        for placement in placements:
            one = SupervisedWorker(placement, self.launch, self.dispatcher)  # type: ignore[arg-type]
            self.dispatcher.add(one)
            one.adopt(self._worker(placement))  # type: ignore[arg-type]

    def _dispatcher(self, limiter: InstanceRateLimiter) -> Dispatcher:
        self.waiting = RequestQueue(QueuePolicy(default_timeout_us=300_000), limit=6)
        scheduler = DynamicBatcher(self.waiting, SIGNATURE, preferred=(2,), max_delay_us=100_000)
        return Dispatcher(scheduler, self.statistics, limiter=limiter)

    def _model(self) -> Model:
        return Model(self.config, 1, self.dispatcher, self.statistics, {})

    async def launch(self, placement: WorkerPlacement) -> FakeWorker:
        return self._worker(placement)

    def _worker(self, placement: WorkerPlacement) -> FakeWorker:
        self.workers.append(FakeWorker(placement.name))
        self.workers[-1].slots = self.per_worker
        return self.workers[-1]

    def request(self, value: int, answers: Answers) -> InferRequest:
        tensor = WireTensor("x", "UINT8", (1, 1), bytes([value % 3]))
        return InferRequest(self.model.name, {"x": tensor}, answers)

    @property
    def looked_up(self) -> int:
        return 0

    @property
    def running(self) -> list[InferRequest]:
        return [request for worker in self.workers for batch in worker.batches for request in batch.requests]

    @property
    def taken(self) -> int:
        """How much the instances that run need now."""
        return self.need * sum(bool(worker.batches) for worker in self.workers)


class CachedModel(OneModel):
    def __init__(self, name: str, need: int, limiter: InstanceRateLimiter, cache: LocalCache, ordered: bool) -> None:
        self.scope = SlowArea(cache.scope(name, 1, b""))
        self._ordered = ordered
        super().__init__(name, need, limiter)

    def _model(self) -> Model:
        lookup = CacheLookup(self.dispatcher, lambda: self.scope, self.statistics)  # type: ignore[arg-type,return-value]
        return Model(self.config, 1, self.dispatcher, self.statistics, {}, cache=lookup, ordered=self._ordered)

    @property
    def looked_up(self) -> int:
        return len(self.scope.lookups)


class SequenceModel(OneModel):
    """Requests of three sequences, each of which may begin or end one."""

    def __init__(
        self, name: str, need: int, limiter: InstanceRateLimiter, oldest: bool, max_delay: int = 10**8
    ) -> None:
        self._policy = SequencePolicy(
            "m", max_batch_size=2, slots=2, max_idle=10**9, oldest=oldest, limit=6, max_delay=max_delay,
            minimum_utilization=0.75, preferred=(2,),
        )  # fmt: skip
        super().__init__(name, need, limiter)

    def _dispatcher(self, limiter: InstanceRateLimiter) -> Dispatcher:
        controls = ControlInputs(self.config.sequence_batching, batched=True)
        scheduler = SequenceScheduler(self._policy, SIGNATURE, controls, StateKeeper())
        return Dispatcher(scheduler, self.statistics, limiter=limiter)

    def request(self, value: int, answers: Answers) -> InferRequest:
        request = super().request(value, answers)
        request.correlation_id, request.flags = value % 3 + 1, (1, 0, 0, 2, 1, 3)[value]
        return request


class Engine(OneModel):
    per_worker = ENGINE_SLOTS

    def _dispatcher(self, limiter: InstanceRateLimiter) -> Dispatcher:
        return Dispatcher(DirectScheduler(RequestQueue(limit=6)), self.statistics, limiter=limiter)


class World:
    def __init__(self, ordered: bool) -> None:
        self.limiter = InstanceRateLimiter([Resource("R", max(NEEDS) + 1, -1)])
        self.cache = LocalCache(2_000)
        self.cached = [CachedModel(n, NEEDS["ab".index(n)], self.limiter, self.cache, ordered) for n in "ab"]
        self.models: list[OneModel] = [
            *self.cached,
            SequenceModel("c", NEEDS[2], self.limiter, oldest=False),
            SequenceModel("d", NEEDS[3], self.limiter, oldest=True),
            Engine("e", NEEDS[4], self.limiter),
        ]
        self.sent: list[tuple[OneModel, InferRequest, Answers]] = []
        self.refused = 0

    def send(self, of: OneModel, value: int) -> None:
        answers = Answers()
        request = of.request(value, answers)
        try:
            of.model.infer(request)
        except ConchError:
            self.refused += 1
        else:
            self.sent.append((of, request, answers))

    def check(self) -> None:
        for of in self.models:
            mine = [(request, answers) for model, request, answers in self.sent if model is of]
            unfinished = [request for request, _ in mine if not request.finished]
            assert of.model.in_flight == len(unfinished)
            assert all(answers.finals <= 1 for _, answers in mine)
            running = [request for request in of.running if not request.finished]
            assert len(running) + len(of.queue) + of.looked_up >= len(unfinished)
            assert len(of.queue) <= 6
        taken = sum(of.taken for of in self.models)
        assert taken <= max(NEEDS) + 1
        assert taken == self.limiter.taken.get(ResourceKey(0, "R"), 0)
        assert self.cache.used <= self.cache.size

    async def drain(self) -> None:
        """End whatever runs until nothing is left, which must happen."""
        for _ in range(200):
            for cached in self.cached:
                cached.scope.answer()
            for of in self.models:
                for one in of.workers:
                    while one.batches:
                        one.finish_batch()
            await settle()
            if all(request.finished for _, request, _ in self.sent):
                break
            await asyncio.sleep(0.1)
        assert [answers.finals for *_, answers in self.sent] == [1] * len(self.sent)
        assert all(of.model.in_flight == 0 and len(of.queue) == 0 for of in self.models)
        assert not any(self.limiter.taken.values())


def _finish(world: World, of: OneModel, value: int) -> None:
    busy = [worker for worker in of.workers if worker.batches]
    if busy:
        busy[value % len(busy)].finish_batch()


def _cancel(world: World, of: OneModel, value: int) -> None:
    if world.sent:
        request = world.sent[value % len(world.sent)][1]
        running = any(request in model.running for model in world.models)
        request.cancel()
        assert running or request.finished or request.on_cancel is None


def _kill(world: World, of: OneModel, value: int) -> None:
    alive = [worker for worker in of.workers if worker.alive]
    if alive:
        alive[value % len(alive)].die()


def _slow(world: World, of: OneModel, value: int) -> None:
    scope = _scope(world, value)
    scope.slow = not scope.slow


def _scope(world: World, value: int) -> SlowArea:
    return world.cached[value % len(world.cached)].scope


STEPS: dict[str, Callable[[World, OneModel, int], None]] = {
    "send": lambda world, of, value: world.send(of, value),
    "finish": _finish,
    "cancel": _cancel,
    "kill": _kill,
    "slow": _slow,
    "answer": lambda world, of, value: _scope(world, value).answer(),
    "forget": lambda world, of, value: _scope(world, value).forget(),
}


@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "send", "finish", "wait", *STEPS]),
            st.integers(0, len(NEEDS) - 1),
            st.integers(0, 5),
        ),
        max_size=60,
    ),
)
def test_every_request_is_accounted_for(ordered: bool, steps: list[tuple[str, int, int]]) -> None:
    async def run(loop: FakeClockLoop) -> None:
        world = World(ordered)
        for name, which, value in steps:
            if name == "wait":
                await asyncio.sleep(0.05 * value)
            else:
                STEPS[name](world, world.models[which], value)
            await settle()
            world.check()
        await world.drain()

    with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, FakeClockLoop)
        clock = lambda: int(loop.now * 1e9) + 1  # noqa: E731
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(dispatch, "monotonic_ns", clock))
            stack.enter_context(patch.object(worker, "BACK_OFF", (0.0, 0.1)))
            runner.run(run(loop))
