"""A model version in front of an executor that the test controls."""

import asyncio

import pytest

from conch.config.pbtxt import parse
from conch.core.errors import Code, ConchError, cancelled, internal, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.server.execution.executor import Executor
from conch.server.model import Model
from conch.telemetry.statistics import FailureReason, ModelStatistics
from tests.unit.fake_clock import fake_clock
from tests.unit.server.fakes import Answers

CONFIG = """
name: "m" backend: "python"
input [{name: "x" data_type: TYPE_FP32 dims: [1]}]
output [{name: "y" data_type: TYPE_FP32 dims: [1, 1] reshape: {shape: [1]}}]
"""


class FakeExecutor(Executor):
    sequences = 0

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.refusal: Exception | None = None
        self.stopped = False

    def continues(self, request: InferRequest) -> bool:
        return request.correlation_id == "under way"

    def submit(self, request: InferRequest) -> None:
        if self.refusal:
            raise self.refusal
        self.requests.append(request)

    async def stop(self, seconds: float | None) -> None:
        self.stopped = True


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
async def model(executor: FakeExecutor) -> Model:
    return Model(parse(CONFIG, "x"), 3, executor, ModelStatistics("m", 3), {"y": ["a"]})


def make(answers: Answers, data: bytes = b"abcd") -> InferRequest:
    return InferRequest("m", {"x": WireTensor("x", "FP32", (1,), data)}, answers)


def answered(request: InferRequest) -> None:
    request.times.started = 1
    request.responded = True


async def test_accepted_request_knows_its_version_and_all_outputs(model: Model, executor: FakeExecutor) -> None:
    model.infer(make(Answers()))
    assert (executor.requests[0].model_version, executor.requests[0].outputs) == (3, ("y",))
    assert model.in_flight == 1


async def test_another_server_chooses_the_outputs_of_a_request_that_names_none(executor: FakeExecutor) -> None:
    config = parse(CONFIG.replace('"python"', '"remote"'), "x")
    model = Model(config, 1, executor, ModelStatistics("m", 1), {})
    model.infer(make(Answers()))
    assert executor.requests[0].outputs == ()


async def test_reshaped_output_gets_the_shape_that_clients_know(model: Model, executor: FakeExecutor) -> None:
    answers = Answers()
    model.infer(make(answers))
    answered(executor.requests[0])
    executor.requests[0].respond(InferResponse([WireTensor("y", "FP32", (1,), b"abcd")]))
    assert answers.responses[0].outputs[0].shape == (1, 1)


@pytest.mark.parametrize("final", [False, True])
async def test_response_that_cannot_be_processed_becomes_an_error(
    model: Model, executor: FakeExecutor, final: bool
) -> None:
    answers = Answers()
    model.infer(make(answers))
    request = executor.requests[0]
    request.observe(lambda response: response.outputs[0].shape.fail())
    request.respond(InferResponse([WireTensor("y", "FP32", (1,), b"abcd")], final=final))
    assert answers.error is not None and answers.error.code is Code.INTERNAL
    assert (answers.finals, model.in_flight) == ((1, 0) if final else (0, 1))


async def test_ordered_model_delivers_responses_in_the_order_of_their_requests(executor: FakeExecutor) -> None:
    model = Model(parse(CONFIG, "x"), 3, executor, ModelStatistics("m", 3), {}, ordered=True)
    first, second = Answers(), Answers()
    for answers in (first, second):
        model.infer(make(answers))
    executor.requests[1].respond(InferResponse())
    assert not second.responses
    executor.requests[0].respond(InferResponse())
    assert first.finals == second.finals == 1


async def test_success_is_counted_before_the_client_hears_of_it(model: Model, executor: FakeExecutor) -> None:
    seen: list[int] = []
    request = InferRequest(
        "m", {"x": WireTensor("x", "FP32", (1,), b"abcd")}, lambda response: seen.append(model.statistics.success_count)
    )
    model.infer(request)
    answered(request)
    request.respond(InferResponse())
    request.respond(InferResponse())
    assert (seen, model.statistics.success_count, model.in_flight) == ([1], 1, 0)


async def test_error_of_the_models_own_counts_as_an_answer(model: Model, executor: FakeExecutor) -> None:
    model.infer(make(Answers()))
    answered(executor.requests[0])
    executor.requests[0].fail(internal("mine"))
    assert (model.statistics.success_count, model.statistics.fail_count) == (1, 0)


@pytest.mark.parametrize(
    ("error", "started", "reason"),
    [
        (internal("died"), 1, FailureReason.BACKEND),
        (unavailable("late"), 0, FailureReason.REJECTED),
        (cancelled(), 0, FailureReason.CANCELED),
    ],
)
async def test_failures_are_counted_by_reason(
    model: Model, executor: FakeExecutor, error: ConchError, started: int, reason: FailureReason
) -> None:
    model.infer(make(Answers()))
    executor.requests[0].times.started = started
    executor.requests[0].fail(error)
    assert model.statistics.failures[reason] == 1


async def test_invalid_request_is_refused_and_not_counted(model: Model) -> None:
    with pytest.raises(ConchError, match="byte size mismatch"):
        model.infer(make(Answers(), b"abc"))
    assert (model.in_flight, model.statistics.fail_count) == (0, 0)


@pytest.mark.parametrize(
    ("refusal", "code"), [(unavailable("full"), Code.UNAVAILABLE), (KeyError("a bug"), Code.INTERNAL)]
)
async def test_request_that_the_queue_refuses_is_counted_as_rejected(
    model: Model, executor: FakeExecutor, refusal: Exception, code: Code
) -> None:
    executor.refusal = refusal
    with pytest.raises(ConchError, match=r"full|a bug") as refused:
        model.infer(make(Answers()))
    assert refused.value.code is code
    assert (model.in_flight, model.statistics.failures[FailureReason.REJECTED]) == (0, 1)


async def test_stopping_model_refuses_clients_but_not_the_steps_of_ensembles(model: Model) -> None:
    model.stopping = True
    with pytest.raises(ConchError, match="has stopped accepting new inference requests") as refused:
        model.infer(make(Answers()))
    assert refused.value.code is Code.UNAVAILABLE
    model.run_step(make(Answers()))


@pytest.mark.parametrize("by_force", [True, False])
async def test_a_model_that_has_been_stopped_refuses_the_steps_of_ensembles_too(model: Model, by_force: bool) -> None:
    if by_force:
        model.abandon()
    else:
        await model.stop()

    with pytest.raises(ConchError, match="Server is stopping") as raised:
        model.run_step(make(Answers()))

    assert raised.value.code is Code.UNAVAILABLE
    assert model.in_flight == 0


async def test_stopping_model_continues_with_sequences_that_are_in_progress(model: Model) -> None:
    model.stopping = True
    request = make(Answers())
    request.correlation_id = "under way"
    model.infer(request)
    assert model.in_flight == 1


@fake_clock
async def test_drain_waits_for_the_last_sequence(model: Model, executor: FakeExecutor) -> None:
    executor.sequences = 1
    waiting = asyncio.ensure_future(model.drain(10.0))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    executor.sequences = 0
    await asyncio.sleep(0.2)
    assert waiting.done()
    executor.sequences = 1
    await model.drain(0.5)


async def test_finish_waits_for_the_last_request(model: Model, executor: FakeExecutor) -> None:
    model.infer(make(Answers()))
    waiting = asyncio.ensure_future(model.finish())
    await asyncio.sleep(0)
    assert not waiting.done()
    executor.requests[0].respond(InferResponse())
    assert await waiting
