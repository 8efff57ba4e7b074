"""Decoupled models: gRPC streams, ``generate`` and ``generate_stream``."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2_grpc

from tests.conformance.calls import call
from tests.conformance.clients import floats, ints
from tests.conformance.grpc_cases import EMPTY_FINAL, Call, add_sub, repeat, request, square, tensor
from tests.conformance.raw import post
from tests.conftest import Server


def stream(server: Server, *requests: Any) -> list[Any]:
    """Return all responses of one stream, which must end without an error."""
    outcome = call(server.grpc, Call("ModelStreamInfer", list(requests)))
    assert outcome.code == "OK", outcome.details
    return outcome.messages


def final(message: Any) -> bool:
    value: bool = message.infer_response.parameters["triton_final_response"].bool_param
    return value


def number(message: Any) -> int:
    return int.from_bytes(message.infer_response.raw_output_contents[0], "little", signed=True)


def test_one_response_for_each_element(server: Server) -> None:
    messages = stream(server, repeat(4, 2, 0, 1, id="r"))
    assert [number(message) for message in messages] == [4, 2, 0, 1]
    assert all(message.infer_response.id == "r" for message in messages)
    assert not any(final(message) for message in messages)


def test_empty_final_only_when_asked_for(server: Server) -> None:
    assert stream(server, repeat(id="r")) == []
    messages = stream(server, repeat(7, id="r", parameters=EMPTY_FINAL))
    assert [final(message) for message in messages] == [False, True]
    assert not messages[1].infer_response.outputs


def test_last_response_may_be_the_final_one(server: Server) -> None:
    assert [final(message) for message in stream(server, square(3, parameters=EMPTY_FINAL))] == [False, False, True]


def test_error_response_does_not_end_the_stream(server: Server) -> None:
    messages = stream(server, repeat(1, -1, 2, id="r"))
    assert [message.error_message for message in messages] == ["", "negative", ""]
    assert messages[1].infer_response.id == "r"


def test_refused_request_does_not_end_the_stream(server: Server) -> None:
    messages = stream(server, request("absent", [], id="a"), add_sub(id="b"))
    assert messages[0].error_message == "Request for unknown model: 'absent' is not found"
    assert [message.infer_response.id for message in messages] == ["a", "b"]


def test_one_response_models_answer_in_order(server: Server) -> None:
    messages = stream(server, *(add_sub(id=str(n)) for n in range(50)))
    assert [message.infer_response.id for message in messages] == [str(n) for n in range(50)]
    assert all(final(message) for message in messages)


def test_responses_of_one_request_are_in_order_among_others(server: Server) -> None:
    messages = stream(server, *(repeat(*range(20), id=str(n)) for n in range(5)))
    for n in range(5):
        assert [number(m) for m in messages if m.infer_response.id == str(n)] == list(range(20))


def test_strict_mode_ends_the_stream_with_the_error(server: Server) -> None:
    failing = request("faults", [tensor("MODE", "BYTES", [1, 1], bytes_contents=[b"NOT_FOUND"])], id="f")
    outcome = call(server.grpc, Call("ModelStreamInfer", [failing], (("triton_grpc_error", "true"),)))
    assert (outcome.code, outcome.details, outcome.messages) == ("NOT_FOUND", "NOT_FOUND fails", [])


def test_async_decoupled_model_answers_all_its_requests(server: Server) -> None:
    inputs = [tensor("IN", "INT32", [1], int_contents=[6])]
    messages = stream(server, *(request("asynchronous_decoupled", inputs, id=str(n)) for n in range(8)))
    for n in range(8):
        assert [number(m) for m in messages if m.infer_response.id == str(n)] == list(range(6))


def test_ensemble_with_a_decoupled_member(server: Server) -> None:
    inputs = [tensor("IN", "INT32", [3], int_contents=[5, 6, 7])]
    messages = stream(server, request("repeated", inputs, id="e", parameters=EMPTY_FINAL))
    assert [number(message) for message in messages if message.infer_response.outputs] == [6, 7, 8]
    assert {(message.infer_response.model_name, message.infer_response.id) for message in messages} == {
        ("repeated", "e")
    }
    # The last response is the final one only if the step sent its final flag before the response was forwarded.
    assert [final(message) for message in messages][-1] is True
    assert sum(map(final, messages)) == 1
    messages = stream(server, request("repeated", inputs, id="e"))
    assert [number(message) for message in messages] == [6, 7, 8]


def test_client_cancels_a_stream(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        inputs = [
            tensor("IN", "INT32", [1000], int_contents=range(1000)),
            tensor("DELAY", "UINT32", [1000], uint_contents=[0] + [10] * 999),
        ]
        responses = stub.ModelStreamInfer(iter([request("repeat", inputs)]))
        assert number(next(responses)) == 0
        responses.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            next(responses)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert [number(message) for message in stream(server, repeat(3))] == [3]


def test_tritonclient_streams(server: Server) -> None:
    received: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        for n in (2, 3):
            value = tritonclient.grpc.InferInput("IN", [1], "INT32")
            value.set_data_from_numpy(ints(n))
            client.async_stream_infer("square", [value], request_id=str(n))
        results = [received.get(timeout=60) for _ in range(5)]
        client.stop_stream()
    assert all(error is None for _, error in results)
    assert sorted(result.get_response().id for result, _ in results) == ["2", "2", "3", "3", "3"]


def test_call_with_a_deadline_ends(server: Server) -> None:
    inputs = [tensor("IN", "INT32", [1], int_contents=[1]), tensor("DELAY", "UINT32", [1], uint_contents=[2000])]
    outcome = call(server.grpc, Call("ModelStreamInfer", [request("repeat", inputs)]), timeout=0.2)
    assert outcome.code == "DEADLINE_EXCEEDED"


class Events:
    """The server-sent events of a ``generate_stream`` reply, as they arrive."""

    def __init__(self, server: Server, model: str, body: dict[str, Any]) -> None:
        host, port = server.http.split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self.connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body))
        self.response = self.connection.getresponse()

    def __iter__(self) -> Iterator[Any]:
        while line := self.response.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def test_generate(server: Server) -> None:
    reply = post(server.http, "/v2/models/generate/generate", {"PROMPT": "hello", "id": "g"})
    assert reply.json() == {"COUNT": 0, "TEXT": "hello", "id": "g", "model_name": "generate", "model_version": "1"}


def test_generate_refuses_several_responses(server: Server) -> None:
    reply = post(server.http, "/v2/models/generate/generate", {"PROMPT": "hello", "times": 2})
    assert (reply.status, reply.error) == (
        200,
        "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
        "number of responses",
    )


def test_generate_stream_sends_events(server: Server) -> None:
    events = Events(server, "generate", {"PROMPT": "hello", "parameters": {"times": 3}})
    assert events.response.status == 200
    assert events.response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    assert [event["COUNT"] for event in events] == [0, 1, 2]


def test_generate_stream_sends_each_event_at_once(server: Server) -> None:
    """The first event arrives while the model still waits to send the second one."""
    events = iter(Events(server, "repeat", {"IN": [1, 2], "DELAY": [0, 500]}))
    first = next(events)
    assert (first["OUT"], first["IDX"]) == (1, 0)
    assert [event["OUT"] for event in events] == [2]


def test_error_within_a_stream_is_an_event(server: Server) -> None:
    events = Events(server, "generate", {"PROMPT": "x", "times": 3, "fail_at": 1})
    assert [event.get("error", event.get("COUNT")) for event in events] == [0, "told to fail", 2]


def test_many_streams_at_once(server: Server) -> None:
    results: dict[int, list[int]] = {}

    def run(n: int) -> None:
        results[n] = [event["COUNT"] for event in Events(server, "generate", {"PROMPT": str(n), "times": n})]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: list(range(n)) for n in range(1, 13)}


def test_generate_of_an_ensemble(server: Server) -> None:
    reply = post(server.http, "/v2/models/chain/generate", {"X": [1.5]})
    assert reply.json()["Y"] == float(floats(3.5)[0])
