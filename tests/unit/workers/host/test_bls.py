"""The server's side of the calls of a worker, without a worker and without models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from conch.core.errors import ConchError, internal, invalid, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.workers.child.buffers import BufferMap
from conch.workers.child.channel import Header
from conch.workers.child.packing import Packer, Unpacker
from conch.workers.host.bls import BlsHandler


class Models:
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.cancelled: list[InferRequest] = []
        self.loads: list[tuple[str, Mapping[str, object], str]] = []
        self.error: ConchError | None = None

    def infer(self, request: InferRequest, decoupled: bool, caller: str) -> None:
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        request.on_cancel = self.cancelled.append

    def is_ready(self, name: str, version: int) -> bool:
        return name == "ready"

    async def load(self, name: str, parameters: Mapping[str, object], starting: str) -> None:
        self.loads.append((name, parameters, starting))
        if self.error is not None:
            raise self.error

    async def unload(self, name: str, dependents: bool) -> None:
        raise RuntimeError("a fault")


class Fixture:
    def __init__(self) -> None:
        self.models = Models()
        self.sent: list[Header] = []
        self.fail: Exception | None = None
        self.calls = BlsHandler(self.models, "caller", self.send)

    async def idle(self) -> None:
        """Wait until no call is in progress."""
        while self.calls.busy:
            await asyncio.sleep(0)

    def send(self, header: Header, packer: Packer | None) -> None:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.sent.append(header)

    def call(self, number: int = 1, *names: str, decoupled: bool = False) -> None:
        packer = Packer()
        tensors = packer.pack([WireTensor(name, "FP32", (1,), b"abcd") for name in names or ("X",)])
        header = {
            "op": "call", "call": number, "decoupled": decoupled, "model": "m", "version": -1, "id": "r",
            "correlation_id": 0, "flags": 0, "timeout": 0, "parameters": {}, "outputs": [], "inputs": tensors,
        }  # fmt: skip
        assert self.calls.handle(header, Unpacker(b"".join(packer.payload), BufferMap()))

    def frame(self, **header: Any) -> None:
        assert self.calls.handle(header, Unpacker(b"", BufferMap()))


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def answer(**fields: Any) -> Header:
    return {"op": "answer", "call": 1, "outputs": [], "parameters": {}, "final": True, **fields}


def test_responses_are_passed_on_until_the_last(fixture: Fixture) -> None:
    fixture.call()
    [request] = fixture.models.requests
    assert bytes(request.inputs["X"].data) == b"abcd"
    request.respond(InferResponse([WireTensor("Y", "FP32", (1,), b"1234")], final=False, parameters={"a": 1}))
    request.respond(InferResponse())
    fixture.calls.close()
    assert fixture.sent == [
        answer(outputs=[["Y", "FP32", (1,), 4]], parameters={"a": 1}, final=False),
        answer(),
    ]
    assert not fixture.models.cancelled


def test_error_of_a_response_keeps_its_code(fixture: Fixture) -> None:
    fixture.call()
    fixture.models.requests[0].fail(unavailable("full"))
    assert fixture.sent == [answer(error=["UNAVAILABLE", "full"])]


def test_error_of_a_decoupled_response_is_internal_as_in_triton(fixture: Fixture) -> None:
    fixture.call(decoupled=True)
    fixture.models.requests[0].fail(unavailable("full"))
    assert fixture.sent == [answer(error=["INTERNAL", "full"])]


def test_refused_request_says_of_which_model(fixture: Fixture) -> None:
    fixture.models.error = invalid("no")
    fixture.call()
    assert fixture.sent == [answer(error=["INTERNAL", "Model m - Error when running inference: no"])]


def test_input_that_comes_twice_is_refused(fixture: Fixture) -> None:
    fixture.call(1, "X", "X")
    message = "Model m - Error when running inference: [request id: r] input 'X' already exists in request"
    assert fixture.sent == [answer(error=["INTERNAL", message])]
    assert not fixture.models.requests


def test_dropped_call_is_cancelled_and_not_answered(fixture: Fixture) -> None:
    fixture.call()
    fixture.frame(op="cancel_call", call=1, drop=True)
    fixture.frame(op="cancel_call", call=1, drop=True)
    assert fixture.models.cancelled == fixture.models.requests
    fixture.models.requests[0].respond(InferResponse())
    assert fixture.sent == []


def test_cancelled_call_is_answered(fixture: Fixture) -> None:
    fixture.call()
    fixture.frame(op="cancel_call", call=1, drop=False)
    assert fixture.models.cancelled == fixture.models.requests
    fixture.models.requests[0].respond(InferResponse())
    assert fixture.sent == [answer()]


def test_end_of_the_worker_cancels_what_runs(fixture: Fixture) -> None:
    fixture.call(1)
    fixture.call(2)
    first, second = fixture.models.requests
    first.respond(InferResponse())
    fixture.calls.close()
    assert fixture.models.cancelled == [second]
    second.respond(InferResponse())
    assert fixture.sent == [answer()]


def test_response_that_cannot_be_passed_is_an_error(fixture: Fixture) -> None:
    fixture.call()
    fixture.fail = internal("no memory")
    fixture.models.requests[0].respond(InferResponse([WireTensor("Y", "FP32", (1,), b"1234")]))
    assert fixture.sent == [answer(error=["INTERNAL", "the response could not be passed to the model: no memory"])]


def test_readiness(fixture: Fixture) -> None:
    for name in ("ready", "absent"):
        fixture.frame(op="model_control", call=1, do="ready", model=name, version=-1, starting=False)
    assert fixture.sent == [answer(parameters={"ready": True}), answer(parameters={"ready": False})]


def test_loads_and_unloads_are_answered_when_they_are_done(fixture: Fixture) -> None:
    async def run() -> None:
        load = {"op": "model_control", "do": "load", "model": "m", "config": "{}", "inputs": []}
        fixture.frame(**load, call=1, starting=True)
        await fixture.idle()
        fixture.models.error = invalid("no")
        fixture.frame(**load, call=1, starting=False)
        await fixture.idle()
        fixture.frame(op="model_control", call=1, do="unload", model="m", dependents=False, starting=False)
        await fixture.idle()

    asyncio.run(run())
    assert fixture.models.loads == [("m", {"config": "{}"}, "caller"), ("m", {"config": "{}"}, "")]
    assert fixture.sent == [
        answer(),
        answer(error=["INVALID_ARG", "no"]),
        answer(error=["INTERNAL", "RuntimeError('a fault')"]),
    ]


def test_other_frames_are_left_alone(fixture: Fixture) -> None:
    assert not fixture.calls.handle({"op": "ready"}, Unpacker(b"", BufferMap()))
