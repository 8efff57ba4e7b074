"""A request and what it brought are gone when it has ended, however it ends, without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any
from weakref import ref

import pytest

from conch.config.pbtxt import parse
from conch.core.errors import ConchError, internal
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.server.execution.dispatch import PREPARE_SECONDS, Dispatcher
from conch.server.execution.ensemble import Ensemble, Step
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.model import Model
from conch.server.schedulers.batching import DynamicBatcher
from conch.server.schedulers.queue import QueuePolicy, RequestQueue
from conch.telemetry.statistics import ModelStatistics
from conch.workers.child.channel import Header
from conch.workers.child.packing import Packer
from conch.workers.host.bls import BlsHandler
from tests.unit.fake_clock import fake_clock, settle
from tests.unit.workers.host.fakes import EMPTY, make_process

X = 'input [{name: "x" data_type: TYPE_UINT8 dims: [-1]}] '
Y = 'output [{name: "y" data_type: TYPE_FP32 dims: [1, 1] reshape: {shape: [1]}}] '
CONFIG = f'name: "m" backend: "python" {X}{Y}'
ENSEMBLE = f'name: "e" {X}{Y}'


class Body(bytearray):
    """What a client has sent; unlike bytes, it can be referred to weakly."""


class Watched(InferRequest):
    """A request that can be referred to weakly."""

    __slots__ = ("__weakref__",)


class FrontEnd:
    """Holds the request that it has sent, as the server's front ends do, and raises what it is answered."""

    request: InferRequest

    def __init__(self) -> None:
        self.finals = 0
        self.errors: list[str] = []

    def on_response(self, response: InferResponse) -> None:
        try:
            if response.error is not None:
                raise response.error
        except ConchError as error:
            self.errors.append(error.message)
        self.finals += response.final


class House:
    """A model in front of a worker whose frames the test writes, and what is left of the requests sent to it."""

    def __init__(self, *, limit: int = 0, ordered: bool = False, prepares: bool = False, timeout: int = 0) -> None:
        statistics = ModelStatistics("m", 1)
        signature = ModelSignature("m", 1, 0, {}, {})
        queue = RequestQueue(QueuePolicy(default_timeout_us=timeout), limit=limit)
        scheduler = DynamicBatcher(queue, signature)
        self.dispatcher = Dispatcher(scheduler, statistics, prepares=prepares)
        self.process, self.child = make_process()
        worker = SupervisedWorker(WorkerPlacement("m_0", "CPU"), self.launch, self.dispatcher)
        self.dispatcher.add(worker)
        worker.adopt(self.process)
        self.model = Model(parse(CONFIG, "m"), 1, self.dispatcher, statistics, {}, ordered=ordered)
        self._left: list[ref[Any]] = []

    async def launch(self, placement: WorkerPlacement) -> Any:
        raise internal("no worker can be had")

    def send(self, size: int = 100, name: str = "x", model: Model | None = None) -> FrontEnd:
        """Send a request; one that is refused has told its front end so."""
        body, front_end = Body(size), FrontEnd()
        request = Watched("m", {name: WireTensor(name, "UINT8", (size,), body)}, front_end.on_response)
        front_end.request = request
        self._left += [ref(body), ref(request), ref(front_end)]
        try:
            (model or self.model).infer(request)
        except ConchError as error:
            front_end.errors.append(error.message)
        return front_end

    def left(self) -> int:
        """How many requests, bodies and front ends still exist."""
        return sum(one() is not None for one in self._left)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def answered(house: House) -> None:
    house.send()
    await settle()
    house.child.done(1, EMPTY)


async def answered_with_large_tensors(house: House) -> None:
    house.send(1 << 20)
    await settle()
    house.child.received()
    house.child.done(1, EMPTY)


async def answered_in_several_responses(house: House) -> None:
    request = house.send().request
    await settle()
    house.child.done(1, None)
    house.child.respond(request, final=False)
    house.child.respond(request)


async def answered_with_an_error(house: House) -> None:
    house.send()
    await settle()
    house.child.done(1, {"error": ["INTERNAL", "bad"], **EMPTY})


async def failed_with_its_batch(house: House) -> None:
    house.send()
    await settle()
    house.child.send({"op": "done", "batch": 1, "times": [0, 0, 0], "error": ["INTERNAL", "bad"]})


async def refused_by_validation(house: House) -> None:
    assert house.send(name="z").errors


async def refused_by_a_full_queue(house: House) -> None:
    house.send()
    await settle()
    house.send()
    assert house.send().errors == ["[request id: <id_unknown>] Exceeds maximum queue size"]
    house.child.done(1, EMPTY)
    await settle()
    house.child.done(2, EMPTY)


async def refused_while_the_model_stops(house: House) -> None:
    house.model.stopping = True
    assert house.send().errors


async def given_up_in_the_queue(house: House) -> None:
    house.send()
    await settle()
    for request in [house.send().request for _ in range(3)]:
        request.cancel()
    del request
    house.child.done(1, EMPTY)
    house.send()  # the queue forgets the others when it is next looked at
    await settle()
    house.child.done(2, EMPTY)
    await asyncio.sleep(PREPARE_SECONDS)


async def given_up_while_it_runs(house: House) -> None:
    request = house.send().request
    await settle()
    request.cancel()
    house.child.done(1, {"error": ["CANCELLED", ""], **EMPTY})


async def late_in_the_queue(house: House) -> None:
    late = house.send()
    await settle()
    assert late.errors == ["Request timeout expired"]


async def lost_with_its_worker(house: House) -> None:
    house.send()
    await settle()
    house.child.exit(-9)


async def refused_without_a_worker(house: House) -> None:
    house.child.exit(-9)
    await settle()
    for _ in range(3):
        assert house.send().errors == ["Stub process 'm_0' is not healthy."]


async def left_when_the_model_ends(house: House) -> None:
    house.send()
    await settle()
    house.send()
    house.model.stopping = True
    house.dispatcher.fail_waiting(internal("ending"))
    house.child.done(1, EMPTY)


@pytest.mark.parametrize(
    ("ends", "options"),
    [
        (answered, {}),
        (answered, {"ordered": True}),
        (answered_with_large_tensors, {}),
        (answered_in_several_responses, {}),
        (answered_with_an_error, {}),
        (failed_with_its_batch, {}),
        (refused_by_validation, {}),
        (refused_by_a_full_queue, {"limit": 1}),
        (refused_while_the_model_stops, {}),
        (given_up_in_the_queue, {}),
        (given_up_in_the_queue, {"ordered": True}),
        (given_up_in_the_queue, {"prepares": True}),
        (given_up_while_it_runs, {}),
        (late_in_the_queue, {"timeout": 1}),
        (lost_with_its_worker, {}),
        (refused_without_a_worker, {}),
        (left_when_the_model_ends, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else ",".join(value),
)
@fake_clock
async def test_nothing_is_left_of_a_request(
    ends: Callable[[House], Coroutine[Any, Any, None]], options: Mapping[str, Any]
) -> None:
    house = House(**options)
    await ends(house)
    await settle()
    assert house.left() == 0
    house.child.close()


@fake_clock
async def test_the_body_of_a_request_is_freed_when_its_worker_has_it() -> None:
    house = House()
    front_end = house.send()
    await settle()
    assert house.left() == 2  # the request and its front end
    del front_end
    house.child.done(1, EMPTY)
    await settle()
    assert house.left() == 0


@pytest.mark.parametrize("end", ["answered", "failed", "given up", "refused"])
@fake_clock
async def test_nothing_is_left_of_a_request_to_an_ensemble(end: str) -> None:
    house = House()
    specs = {"x": TensorSpec("x", "UINT8", (-1,))}
    signature = ModelSignature("e", 1, 0, specs, {"y": TensorSpec("y", "FP32", (1, 1))})
    step = Step("m", -1, {"z" if end == "refused" else "x": "x"}, {"y": "y"})
    executor = Ensemble(signature, [step], lambda name, version: house.model)
    config = parse(ENSEMBLE, "e")
    config.ensemble_scheduling.step.add(model_name="m", model_version=-1)
    request = house.send(model=Model(config, 1, executor, ModelStatistics("e", 1), {})).request
    await settle()
    if end == "answered":
        serial = request.serial + 1
        described = {"op": "response", "serial": serial, "parameters": {}, "final": True}
        house.child.done(1, None)
        house.child.send(described, WireTensor("y", "FP32", (1, 1), b"abcd"))
    elif end == "failed":
        house.child.exit(-9)
    elif end == "given up":
        request.cancel()
        house.child.done(1, {"error": ["CANCELLED", ""], **EMPTY})
    await settle()
    assert request.finished
    del request
    assert house.left() == 0


@pytest.mark.parametrize("end", ["answered", "dropped", "refused"])
@fake_clock
async def test_nothing_is_left_of_a_call_of_a_model(end: str) -> None:
    house = House()
    bodies: list[ref[Any]] = []

    class Models:
        """Passes calls on to the one model, and notes what they bring."""

        def infer(self, request: InferRequest, decoupled: bool, caller: str) -> None:
            house.model.run_step(request)

    class Inputs:
        """Takes the place of an unpacker."""

        def unpack(self, described: object) -> list[WireTensor]:
            body = Body(10)
            bodies.append(ref(body))
            return [WireTensor("z" if end == "refused" else "x", "UINT8", (10,), body)]

    sent: list[Header] = []

    def send(header: Header, packer: Packer | None) -> None:
        sent.append(header)

    handler = BlsHandler(Models(), "caller", send)  # type: ignore[arg-type]
    call = {"op": "call", "call": 1, "model": "m", "version": -1, "id": "", "outputs": [], "parameters": {}}
    call |= {"correlation_id": 0, "flags": 0, "timeout": 0, "decoupled": False, "inputs": []}
    handler.handle(call, Inputs())  # type: ignore[arg-type]
    await settle()
    if end == "dropped":
        handler.handle({"op": "cancel_call", "call": 1, "drop": True}, Inputs())  # type: ignore[arg-type]
    if end != "refused":
        house.child.done(1, EMPTY)
    await settle()
    assert len(sent) == (end != "dropped")
    assert [body() for body in bodies] == [None]
