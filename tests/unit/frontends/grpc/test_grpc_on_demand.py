"""Calls whose models are loaded while they wait."""

from __future__ import annotations

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from conch.core.errors import unavailable
from conch.machine import logs
from tests.unit.frontends.grpc.conftest import text_of, text_request
from tests.unit.frontends.grpc.harness import Frontend
from tests.unit.frontends.grpc.test_grpc_stream_infer import Conversation, numbers
from tests.unit.frontends.on_demand import LateModels


@pytest.fixture
def late(frontend: Frontend) -> LateModels:
    late = LateModels(frontend.server.model)
    frontend.server.model = late.model  # type: ignore[method-assign]
    late.missing = {"echo", "count_down"}
    return late


def test_call_continues_when_its_model_is_loaded(frontend, stub, late):
    call = stub.ModelInfer.future(text_request("echo", "hello"))
    frontend.until(lambda: late.waiting)
    frontend.call(late.load, "echo")
    assert text_of(call.result(60)) == "hello"


def test_question_about_a_model_loads_it(frontend, stub, late):
    call = stub.ModelMetadata.future(pb.ModelMetadataRequest(name="echo"))
    frontend.until(lambda: late.waiting)
    frontend.call(late.load, "echo")
    assert call.result(60).name == "echo"


def test_call_ends_with_the_reason_why_its_model_cannot_be_loaded(frontend, stub, late):
    call = stub.ModelInfer.future(text_request("echo", "hello"))
    frontend.until(lambda: late.waiting)
    frontend.call(late.load, "echo", unavailable("it is broken"))
    assert (call.code(), call.details()) == (grpc.StatusCode.UNAVAILABLE, "it is broken")


def test_deadline_of_a_call_holds_while_it_waits(frontend, stub, late):
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(text_request("echo", "hello"), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    frontend.until(lambda: not late.waiting)


def test_call_that_its_client_cancels_waits_no_longer(frontend, stub, late):
    call = stub.ModelInfer.future(text_request("echo", "hello"))
    frontend.until(lambda: late.waiting)
    call.cancel()
    frontend.until(lambda: not late.waiting)


def test_log_says_that_a_call_is_cancelled_before_it_has_a_request(
    frontend, stub, late, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logs, "verbose", lambda level, text, *arguments: lines.append(text % arguments))
    call = stub.ModelInfer.future(text_request("echo", "hello"))
    frontend.until(lambda: late.waiting)
    call.cancel()
    frontend.until(lambda: not late.waiting and len(lines) >= 2)
    assert lines[-2:] == [
        "Cancellation notification received for ModelInferHandler, rpc_ok=1, context 0, 0 step START",
        "Completing cancellation for ModelInferHandler, rpc_ok=1, context 0, 0 step START",
    ]


def test_responses_of_a_stream_keep_their_order_although_one_model_is_loaded_first(frontend, stub, late):
    with Conversation(stub) as conversation:
        for id, name in [("first", "echo"), ("unknown", "nobody"), ("last", "echo")]:
            conversation.send(text_request(name, "x", id=id))
        frontend.until(lambda: len(late.waiting) == 2)
        conversation.half_close()
        frontend.call(late.load, "echo")
        assert [one.infer_response.id for one in conversation.call] == ["first", "unknown", "last"]


def test_decoupled_model_that_was_loaded_for_it_holds_up_no_response(frontend, stub, late):
    with Conversation(stub) as conversation:
        conversation.send(numbers(1, 2, id="late"), text_request("fp32", "x", id="wrong"))
        frontend.until(lambda: late.waiting)
        frontend.call(late.load, "count_down")
        conversation.half_close()
        responses = list(conversation.call)
    assert [response.infer_response.id for response in responses if not response.error_message] == ["late", "late"]
    assert len([response for response in responses if response.error_message]) == 1


def test_stream_that_is_cancelled_waits_no_longer(frontend, stub, late):
    with Conversation(stub) as conversation:
        conversation.send(text_request("echo", "1"))
        frontend.until(lambda: late.waiting)
    frontend.until(lambda: not late.waiting)


def test_stream_is_told_why_a_model_cannot_be_loaded_and_continues(frontend, stub, late):
    with Conversation(stub) as conversation:
        conversation.send(text_request("echo", "1", id="1"))
        frontend.until(lambda: late.waiting)
        frontend.call(late.load, "echo", unavailable("it is broken"))
        assert next(conversation.call).error_message == "it is broken"
        conversation.send(numbers(1, id="2"))
        frontend.until(lambda: late.waiting)
        frontend.call(late.load, "count_down")
        assert next(conversation.call).infer_response.id == "2"
