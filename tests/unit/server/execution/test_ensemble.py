"""The flow through an ensemble, whose step models respond when the test says so."""

from dataclasses import dataclass, field

import pytest

from conch.core.errors import Code, ConchError, invalid, not_found
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor
from conch.server.execution.ensemble import Ensemble, Step


def tensor(name: str, *shape: int) -> WireTensor:
    return WireTensor(name, "FP32", shape or (1,), name.encode())


def specs(*names: str) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, "FP32", (-1,)) for name in names}


@dataclass
class FakeMember:
    signature: ModelSignature
    requests: list[InferRequest] = field(default_factory=list)
    refusal: ConchError | None = None
    sequences: set[int | str] = field(default_factory=set)

    def continues(self, request: InferRequest) -> bool:
        return request.correlation_id in self.sequences

    def run_step(self, request: InferRequest) -> None:
        if self.refusal:
            raise self.refusal
        self.requests.append(request)


class Flow:
    """An ensemble of fake step models ``a``, ``b`` …, each with an input ``x`` and an output ``y``."""

    def __init__(
        self, *steps: Step, outputs: tuple[str, ...], decoupled: str = "", inputs=("in",), batch=None, limit: int = 0
    ) -> None:
        self.step_models = {
            step.model: FakeMember(
                ModelSignature(
                    step.model,
                    1,
                    (batch or {}).get(step.model, 0),
                    specs(*step.inputs),
                    specs(*step.outputs),
                    decoupled=step.model in decoupled,
                )
            )
            for step in steps
        }
        signature = ModelSignature("e", 1, 0, specs(*inputs), specs(*outputs), decoupled=bool(decoupled))
        self.ensemble = Ensemble(signature, steps, self.find, limit)
        self.responses: list[InferResponse] = []

    def find(self, name: str, version: int) -> FakeMember:
        if name not in self.step_models:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        return self.step_models[name]

    def run(self, outputs: tuple[str, ...] = (), **fields) -> InferRequest:
        request = InferRequest("e", {"in": tensor("in")}, self.responses.append, outputs=outputs, **fields)
        self.ensemble.submit(request)
        return request

    def answer(self, model: str, *outputs: str, final: bool = True) -> None:
        self.step_models[model].requests[-1].respond(InferResponse([tensor(name) for name in outputs], final=final))

    def asked(self) -> list[str]:
        return [name for name, model in self.step_models.items() if model.requests]


def step(model: str, source: str | dict[str, str], target: str | dict[str, str]) -> Step:
    inputs = {"x": source} if isinstance(source, str) else source
    outputs = {"y": target} if isinstance(target, str) else target
    return Step(model, -1, inputs, outputs)


def test_steps_run_one_after_the_other() -> None:
    flow = Flow(step("a", "in", "mid"), step("b", "mid", "out"), outputs=("out",))
    flow.run()
    assert flow.asked() == ["a"]
    flow.answer("a", "y")
    assert flow.asked() == ["a", "b"]
    assert flow.step_models["b"].requests[0].inputs["x"].data == b"y"
    flow.answer("b", "y")
    assert [output.name for output in flow.responses[0].outputs] == ["out"]
    assert flow.responses[0].final


def test_independent_steps_run_at_the_same_time() -> None:
    flow = Flow(
        step("a", "in", "left"),
        step("b", "in", "right"),
        step("c", {"x": "left", "z": "right"}, "out"),
        outputs=("out",),
    )
    flow.run()
    assert flow.asked() == ["a", "b"]
    flow.answer("b", "y")
    assert flow.asked() == ["a", "b"]
    flow.answer("a", "y")
    assert flow.asked() == ["a", "b", "c"]


def test_a_request_continues_a_sequence_if_it_does_so_in_one_of_the_steps() -> None:
    flow = Flow(step("a", "in", "mid"), step("b", "mid", "out"), outputs=("out",))
    flow.step_models["b"].sequences.add(7)
    known, unknown = (InferRequest("e", {}, flow.responses.append, correlation_id=number) for number in (7, 8))
    assert (flow.ensemble.continues(known), flow.ensemble.continues(unknown)) == (True, False)
    del flow.step_models["a"]
    assert not flow.ensemble.continues(known)


def test_unrequested_outputs_prune_their_steps() -> None:
    flow = Flow(step("a", "in", "one"), step("b", "in", "two"), outputs=("one", "two"))
    flow.run(outputs=("two",))
    assert flow.asked() == ["b"]


def test_first_error_ends_the_request_and_cancels_the_rest() -> None:
    flow = Flow(step("a", "in", "one"), step("b", "in", "two"), outputs=("one", "two"))
    flow.run()
    flow.step_models["a"].requests[0].fail(invalid("bad"))
    assert [response.error.status for response in flow.responses if response.error] == [
        "Invalid argument: in ensemble 'e', bad"
    ]
    assert flow.step_models["b"].requests[0].cancelled
    flow.answer("b", "y")
    assert len(flow.responses) == 1


def test_refused_step_is_an_error_of_the_ensemble() -> None:
    flow = Flow(step("a", "in", "out"), outputs=("out",))
    flow.step_models["a"].refusal = ConchError("full", Code.UNAVAILABLE)
    flow.run()
    assert flow.responses[0].error is not None
    assert flow.responses[0].error.status == "Unavailable: in ensemble 'e', full"


def test_unexpected_failure_of_the_server_after_a_step_fails_the_request_and_cancels_the_rest() -> None:
    flow = Flow(step("a", "in", "one"), step("b", "in", "two"), outputs=("one", "two"))
    flow.run()
    unexpected = {"sequence_id": float("inf")}  # no integer
    flow.step_models["a"].requests[0].respond(InferResponse([tensor("y")], parameters=unexpected))
    assert [response.error.status for response in flow.responses if response.error] == [
        "Internal: in ensemble 'e', OverflowError: cannot convert float infinity to integer"
    ]
    assert flow.step_models["b"].requests[0].cancelled


def test_cancelling_reaches_the_running_steps() -> None:
    flow = Flow(step("a", "in", "out"), outputs=("out",))
    flow.run().cancel()
    assert flow.step_models["a"].requests[0].cancelled
    assert flow.responses[0].error is not None
    assert flow.responses[0].error.code is Code.CANCELLED


def test_output_that_a_step_does_not_give_is_absent_downstream() -> None:
    flow = Flow(
        step("a", "in", {"y": "mid", "extra": "option"}),
        step("b", {"x": "mid", "z": "option"}, "out"),
        outputs=("out",),
    )
    flow.run()
    flow.answer("a", "y")
    assert list(flow.step_models["b"].requests[0].inputs) == ["x"]


def test_optional_input_of_the_ensemble_may_be_absent() -> None:
    flow = Flow(step("a", {"x": "in", "z": "maybe"}, "out"), outputs=("out",), inputs=("in", "maybe"))
    flow.run()
    assert list(flow.step_models["a"].requests[0].inputs) == ["x"]


def test_each_response_of_a_decoupled_member_flows_on() -> None:
    flow = Flow(step("a", "in", "mid"), step("b", "mid", "out"), outputs=("out",), decoupled="a")
    flow.run()
    flow.answer("a", "y", final=False)
    flow.answer("b", "y")
    flow.answer("a", "y", final=False)
    flow.answer("a")
    assert [response.final for response in flow.responses] == [False]
    flow.answer("b", "y")
    assert [(len(response.outputs), response.final) for response in flow.responses] == [(1, False), (1, True)]


def test_step_has_no_more_requests_in_progress_than_it_may() -> None:
    flow = Flow(step("a", "in", "mid"), step("b", "mid", "out"), outputs=("out",), decoupled="a", limit=2)
    flow.run()
    for _ in range(5):
        flow.answer("a", "y", final=False)
    flow.answer("a")
    asked = flow.step_models["b"].requests
    for number in range(5):
        assert len(asked) == min(number + 2, 5)
        asked[number].respond(InferResponse([tensor("y")]))
    assert [response.final for response in flow.responses] == [False] * 4 + [True]


@pytest.mark.parametrize("error", [None, invalid("wrong")])
def test_what_waits_for_its_turn_is_cancelled_with_the_request(error: ConchError | None) -> None:
    flow = Flow(step("a", "in", "mid"), step("b", "mid", "out"), outputs=("out",), decoupled="a", limit=1)
    request = flow.run()
    for _ in range(3):
        flow.answer("a", "y", final=False)
    (first,) = flow.step_models["b"].requests
    if error is None:
        request.cancel()
        assert first.cancelled
    else:
        first.fail(error)
    first.respond(InferResponse([tensor("y")]))
    assert len(flow.step_models["b"].requests) == 1
    assert [response.final for response in flow.responses] == [True]


def test_end_that_comes_after_the_last_answer_is_an_empty_response() -> None:
    flow = Flow(step("a", "in", "out"), outputs=("out",), decoupled="a")
    flow.run()
    flow.answer("a", "y", final=False)
    flow.answer("a")
    assert [(len(response.outputs), response.final) for response in flow.responses] == [(1, False), (0, True)]


def test_late_branch_completes_several_answers_of_which_the_last_is_final() -> None:
    flow = Flow(step("a", "in", "out"), step("b", "in", "side"), outputs=("out", "side"), decoupled="a")
    flow.run()
    flow.answer("a", "y", final=False)
    flow.answer("a", "y")
    assert flow.responses == []
    flow.answer("b", "y")
    assert [(len(response.outputs), response.final) for response in flow.responses] == [(2, False), (2, True)]


def test_decoupled_member_without_responses_ends_the_request() -> None:
    flow = Flow(step("a", "in", "out"), outputs=("out",), decoupled="a")
    flow.run()
    flow.answer("a")
    assert [(response.empty, response.final) for response in flow.responses] == [(True, True)]


def test_slow_branch_beside_a_decoupled_one_is_waited_for() -> None:
    flow = Flow(
        step("a", "in", "mid"), step("b", "in", "side"), step("c", {"x": "mid", "z": "side"}, "out"),
        outputs=("out",), decoupled="a",
    )  # fmt: skip
    flow.run()
    flow.answer("a", "y", final=False)
    flow.answer("a", "y", final=True)
    assert flow.asked() == ["a", "b"]
    flow.answer("b", "y")
    assert len(flow.step_models["c"].requests) == 2


@pytest.mark.parametrize(
    ("batch", "given", "seen"),
    [({"a": 4}, (3,), (1, 3)), ({"a": 4}, (2, 3), (2, 3)), ({"a": 0}, (1, 3), (3,)), ({"a": 0}, (3,), (3,))],
)
def test_batch_dimension_is_adapted(batch: dict[str, int], given: tuple[int, ...], seen: tuple[int, ...]) -> None:
    flow = Flow(step("a", "in", "out"), outputs=("out",), batch=batch)
    request = InferRequest("e", {"in": tensor("in", *given)}, flow.responses.append)
    flow.ensemble.submit(request)
    assert flow.step_models["a"].requests[0].inputs["x"].shape == seen


def test_request_fields_reach_every_step_and_a_member_may_change_the_sequence() -> None:
    flow = Flow(step("a", "in", "mid"), step("b", "mid", "out"), outputs=("out",))
    flow.run(id="r1", priority=2, timeout=5, parameters={"k": 1}, correlation_id=7)
    seen = flow.step_models["a"].requests[0]
    assert (seen.id, seen.priority, seen.timeout, seen.parameters, seen.correlation_id) == ("r1", 2, 5, {"k": 1}, 7)
    seen.respond(InferResponse([tensor("y")], parameters={"sequence_id": 9, "sequence_start": True}))
    assert (flow.step_models["b"].requests[0].correlation_id, flow.step_models["b"].requests[0].flags) == (9, 1)


def test_a_response_without_outputs_has_no_parameters_of_a_sequence() -> None:
    flow = Flow(Step("a", 1, {"x": "in"}, {"y": "out"}), outputs=("out",))
    flow.run()
    flow.step_models["a"].requests[0].respond(InferResponse())
    [response] = flow.responses
    assert (list(response.outputs), response.parameters, response.error) == ([], {}, None)
