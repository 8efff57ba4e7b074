"""``ModelStreamInfer``: order, interleaving, final responses, errors, cancellation, slow readers."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from conch.core.errors import internal
from conch.core.inference import InferResponse
from conch.frontends.grpc import stream_infer
from conch.http2 import Http2ErrorCode, frames, limits
from conch.http2.frames import frame
from tests.unit.frontends.grpc.conftest import array_request, text_of, text_request
from tests.unit.frontends.grpc.fake_core import echo, output
from tests.unit.frontends.grpc.raw_client import STREAM_INFER, headers, message


class Conversation:
    """A stream to which the test adds requests."""

    def __init__(self, stub, **options) -> None:
        self._requests: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), **options)

    def send(self, *requests: pb.ModelInferRequest) -> None:
        for request in requests:
            self._requests.put(request)

    def half_close(self) -> None:
        self._requests.put(None)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.half_close()
        self.call.cancel()


@pytest.fixture
def conversation(stub) -> Iterator[Conversation]:
    with Conversation(stub) as conversation:
        yield conversation


def final(response: pb.ModelStreamInferResponse) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


def numbers(*values: int, **fields: str) -> pb.ModelInferRequest:
    return array_request("count_down", np.array(values, np.int32), **fields)


def test_stream_without_requests_ends_well(stub):
    call = stub.ModelStreamInfer(iter([]))
    assert list(call) == []
    assert call.code() is grpc.StatusCode.OK


def test_responses_keep_the_order_of_the_requests(frontend, conversation):
    model = frontend.server.models["hold"]
    conversation.send(*[text_request("hold", str(number), id=str(number)) for number in range(5)])
    frontend.until(lambda: len(model.received) == 5)
    for request in reversed(model.received):
        frontend.call(echo, request)
    conversation.half_close()
    responses = list(conversation.call)
    assert [response.infer_response.id for response in responses] == list("01234")
    assert [text_of(response.infer_response) for response in responses] == list("01234")
    assert all(final(response) for response in responses)


def test_decoupled_responses_interleave_and_overtake(frontend, conversation):
    waiting, decoupled = frontend.server.models["hold"], frontend.server.models["hold_decoupled"]
    conversation.send(text_request("hold", "slow", id="slow"))
    conversation.send(text_request("hold_decoupled", "a", id="a"), text_request("hold_decoupled", "b", id="b"))
    frontend.until(lambda: len(decoupled.received) == 2)
    first, second = decoupled.received
    for request in (first, second, first):
        frontend.call(lambda request=request: request.respond(output(request, request.inputs["INPUT0"], final=False)))
    responses = [next(conversation.call) for _ in range(3)]
    assert [response.infer_response.id for response in responses] == ["a", "b", "a"]
    assert not any(final(response) for response in responses)
    frontend.call(lambda: second.respond(output(second, second.inputs["INPUT0"])))
    assert final(next(conversation.call))
    frontend.call(lambda: first.respond(InferResponse()))
    frontend.call(echo, waiting.received[0])
    assert next(conversation.call).infer_response.id == "slow"
    conversation.half_close()
    assert list(conversation.call) == []


def test_empty_final_response_is_sent_only_on_request(stub):
    silent = numbers(7, 8, id="silent")
    explicit = numbers(9, id="explicit", model_version="1")
    explicit.parameters["triton_enable_empty_final_response"].bool_param = True
    responses = list(stub.ModelStreamInfer(iter([silent, explicit])))
    assert [(response.infer_response.id, final(response)) for response in responses] == [
        ("silent", False), ("silent", False), ("explicit", False), ("explicit", True),
    ]  # fmt: skip
    last = responses[-1].infer_response
    assert not last.outputs and (last.model_name, last.model_version) == ("count_down", "1")


def test_final_flag_is_that_of_the_response(stub):
    """A response followed by an empty final one does not say that it is the last."""
    late, only = stub.ModelStreamInfer(iter([text_request("misbehave", "late final"), text_request("echo", "x")]))
    assert not final(late) and final(only)


def test_request_that_is_refused_does_not_end_the_stream(stub):
    requests = [
        text_request("echo", "1", id="1"),
        text_request("unknown", "x", id="2"),
        text_request("echo", "x", id="3", model_version="x"),
        array_request("fp32", np.zeros((1, 1), np.float32), id="4"),
        text_request("misbehave", "refuse", id="5"),
        text_request("echo", "6", id="6"),
    ]
    responses = list(stub.ModelStreamInfer(iter(requests), metadata=[("triton_grpc_error", "true")]))
    assert [response.infer_response.id for response in responses] == list("123456")
    errors = [response.error_message for response in responses]
    assert errors[0] == errors[5] == ""
    assert errors[1] == "Request for unknown model: 'unknown' is not found"
    assert errors[2].startswith("failed to get model version")
    assert errors[3].startswith("[request id: 4] unexpected shape")
    assert errors[4] == "Exceeds maximum queue size"
    for response in responses[1:5]:
        assert response.infer_response == pb.ModelInferResponse(id=response.infer_response.id)


def test_execution_that_fails_does_not_end_the_stream(stub):
    requests = [text_request("misbehave", "bad luck", id="1"), numbers(1, -1, 2, id="2"), text_request("echo", "3")]
    bad_luck, one, negative, two, three = stub.ModelStreamInfer(iter(requests))
    assert bad_luck.error_message == "bad luck" and final(bad_luck)
    assert bad_luck.infer_response.model_name == "misbehave" and bad_luck.infer_response.id == "1"
    assert negative.error_message == "negative" and not final(negative)
    assert [response.error_message for response in (one, two, three)] == ["", "", ""]


def test_two_responses_of_a_model_that_is_not_decoupled_are_an_error(stub):
    (response,) = stub.ModelStreamInfer(iter([text_request("misbehave", "twice")]))
    assert response.error_message == "expected a single response, got 2"


def test_strict_stream_ends_with_the_first_execution_error(frontend, stub):
    model = frontend.server.models["hold"]
    with Conversation(stub, metadata=[("triton_grpc_error", "true")]) as conversation:
        conversation.send(text_request("hold", "x"), numbers(1, -1, 2))
        assert not next(conversation.call).error_message
        with pytest.raises(grpc.RpcError) as caught:
            next(conversation.call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "negative"
        frontend.until(lambda: model.cancelled == model.received)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (text_request("unknown", "x"), grpc.StatusCode.NOT_FOUND),
        (array_request("fp32", np.zeros((1, 1), np.float32)), grpc.StatusCode.INVALID_ARGUMENT),
        (text_request("misbehave", "refuse"), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_request_that_is_refused_ends_the_stream_of_a_client_that_wants_all_codes(frontend, stub, refused, code):
    model = frontend.server.models["hold"]
    received = len(model.received)
    with Conversation(stub, metadata=[("conch_grpc_error", "true")]) as conversation:
        conversation.send(text_request("hold", "x"))
        frontend.until(lambda: len(model.received) > received)
        conversation.send(refused)
        with pytest.raises(grpc.RpcError) as caught:
            next(conversation.call)
        assert caught.value.code() is code
        frontend.until(lambda: model.cancelled == model.received)


def test_half_closed_stream_delivers_what_is_in_progress(frontend, conversation):
    model = frontend.server.models["hold"]
    conversation.send(text_request("hold", "x"))
    conversation.half_close()
    frontend.until(lambda: model.received)
    frontend.call(echo, model.received[0])
    assert [text_of(response.infer_response) for response in conversation.call] == ["x"]
    assert conversation.call.code() is grpc.StatusCode.OK


def test_cancelled_stream_cancels_all_its_requests(frontend, conversation):
    models = frontend.server.models
    conversation.send(*[text_request("hold", "x")] * 3, *[text_request("hold_decoupled", "x")] * 2)
    frontend.until(lambda: len(models["hold_decoupled"].received) == 2)
    conversation.call.cancel()
    frontend.until(lambda: len(models["hold"].cancelled) == 3 and len(models["hold_decoupled"].cancelled) == 2)


def test_deadline_ends_the_stream(frontend, stub):
    model = frontend.server.models["hold"]
    with Conversation(stub, timeout=0.05) as conversation:
        conversation.send(text_request("hold", "x"))
        with pytest.raises(grpc.RpcError) as caught:
            next(conversation.call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        frontend.until(lambda: model.cancelled == model.received)


def test_unreadable_message_ends_the_stream_and_cancels_the_rest(frontend):
    model = frontend.server.models["hold"]
    with frontend.client() as client:
        client.send(client.head(1, headers(STREAM_INFER)))
        request = text_request("hold", "x").SerializeToString()
        client.send(frame(frames.DATA, 0, 1, message(request) + message(b"\xff\xff")))
        answer = client.answer(1)
        assert answer.status == 13 and answer.headers["grpc-message"] == "Unable to parse request"
    frontend.until(lambda: model.cancelled == model.received != [])


def test_response_that_cannot_be_encoded_ends_the_stream(stub):
    call = stub.ModelStreamInfer(iter([text_request("misbehave", "unsendable")]))
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


def test_many_large_messages_both_ways(stub):
    arrays = [np.full(500_000, number, np.float32) for number in range(20)]
    responses = stub.ModelStreamInfer(array_request("fp32", array) for array in arrays)
    for array, response in zip(arrays, responses, strict=True):
        assert response.infer_response.raw_output_contents[0] == array.tobytes()


def test_client_that_does_not_read_is_not_read_from(frontend, monkeypatch):
    """Responses that wait hold the next requests back, and with them the client's window."""
    monkeypatch.setattr(stream_infer, "PAUSE_AT", 100_000)
    model = frontend.server.models["echo"]
    request = message(text_request("echo", "x" * 50_000).SerializeToString())
    with frontend.client(initial_window_size=0) as client:
        client.send(client.head(1, headers(STREAM_INFER)))
        for _ in range(5):
            client.send(frame(frames.DATA, 0, 1, request))
        client.ping()
        assert len(model.received) == 2
        client.send(frames.window_update(0, 1 << 30) + frames.window_update(1, 1 << 30))
        client.ping(b"second  ")
        client.send(frame(frames.DATA, frames.END_STREAM, 1, request))
        assert len(client.answer(1).messages()) == 6
        assert len(model.received) == 6


def test_responses_before_their_turn_hold_requests_back(frontend, monkeypatch):
    monkeypatch.setattr(stream_infer, "PAUSE_AT", 100_000)
    slow, fast = frontend.server.models["hold"], frontend.server.models["echo"]
    request = message(text_request("echo", "x" * 50_000).SerializeToString())
    with frontend.client(initial_window_size=1 << 20) as client:
        first = message(text_request("hold", "x").SerializeToString())
        client.send(frames.window_update(0, 1 << 20) + client.head(1, headers(STREAM_INFER)))
        client.send(frame(frames.DATA, 0, 1, first))
        for _ in range(4):
            client.send(frame(frames.DATA, 0, 1, request))
        client.ping()
        assert len(fast.received) == 2
        frontend.call(echo, slow.received[0])
        client.send(frame(frames.DATA, frames.END_STREAM, 1, request))
        assert len(client.answer(1).messages()) == 6


def test_client_that_never_reads_is_disconnected(frontend, monkeypatch):
    monkeypatch.setattr(stream_infer, "GIVE_UP_AT", 100_000)
    model = frontend.server.models["hold_decoupled"]
    with frontend.client(initial_window_size=0) as client:
        client.send(client.head(1, headers(STREAM_INFER)))
        request = text_request("hold_decoupled", "x" * 10_000).SerializeToString()
        client.send(frame(frames.DATA, 0, 1, message(request)))
        client.ping()

        def generate() -> None:
            (request,) = model.received
            text = request.inputs["INPUT0"]
            for _ in range(100):
                request.respond(output(request, text, final=False))

        frontend.call(generate)
        assert client.answer(1).reset == Http2ErrorCode.ENHANCE_YOUR_CALM
        assert model.cancelled == model.received


def test_errors_keep_their_turn(frontend, conversation):
    model = frontend.server.models["hold"]
    conversation.send(text_request("hold", "1", id="1"), text_request("unknown", "x", id="2"))
    frontend.until(lambda: model.received)
    frontend.call(lambda: model.received[0].fail(internal("late")))
    assert [next(conversation.call).infer_response.id for _ in range(2)] == ["1", "2"]


def test_requests_beyond_those_that_run_stay_with_the_client(frontend, monkeypatch):
    monkeypatch.setattr(stream_infer, "MAX_RUNNING", 2)
    model = frontend.server.models["hold"]
    with frontend.client() as client:
        stream = client.new_stream()
        body = message(text_request("hold", "x" * 1000).SerializeToString())
        client.send(client.head(stream, headers(STREAM_INFER)))
        window = limits.STREAM_WINDOW
        client.send(frame(frames.DATA, 0, stream, (body * (window // len(body) + 1))[:window]))
        client.ping()
        assert len(model.received) == 2
        # No more than a window is read of what waits.
        given = sum(increment for target, increment in client.window_updates if target == stream)
        assert given < window
        for ended in range(1, 5):
            frontend.call(echo, model.received[ended - 1])
            frontend.until(lambda ended=ended: len(model.received) == ended + 2)
            client.ping(ended.to_bytes(8, "big"))
            assert len(model.received) == ended + 2
