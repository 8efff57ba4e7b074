"""gRPC calls from real clients: messages, compression, deadlines, cancellation, broken connections."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from conch.core.errors import invalid
from conch.core.tensors import pack_bytes, split_bytes
from conch.frontends.grpc import messages
from conch.frontends.grpc.status import Status
from conch.http2 import Http2ErrorCode, frames
from conch.http2.frames import frame
from conch.machine import logs
from tests.unit.frontends.grpc.conftest import UNLIMITED, array_request, models, text_of, text_request
from tests.unit.frontends.grpc.fake_core import hold
from tests.unit.frontends.grpc.harness import Frontend
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, STREAM_INFER, headers, message

LIVE_ANSWER = pb.ServerLiveResponse(live=True).SerializeToString()


# Messages


def test_large_message_goes_both_ways(stub):
    array = np.arange(5_000_000, dtype=np.float32)
    response = stub.ModelInfer(array_request("fp32", array))
    assert response.raw_output_contents[0] == array.tobytes()


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_numbers_of_a_large_message_become_bytes(stub, compression):
    array = np.arange(300_000, dtype=np.float32)
    request = array_request("fp32", array)
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(array.tolist())
    response = stub.ModelInfer(request, compression=compression)
    assert response.raw_output_contents[0] == array.tobytes()


def test_many_texts_are_counted_elsewhere(stub):
    texts = [b"%d" % number for number in range(100_000)]
    request = pb.ModelInferRequest(model_name="echo")
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[len(texts)])
    request.raw_input_contents.append(pack_bytes(texts))
    assert split_bytes(stub.ModelInfer(request).raw_output_contents[0]) == texts
    request.inputs[0].shape[0] += 1
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected 100001 string elements" in caught.value.details()


def test_hundred_calls_run_at_once(frontend, stub):
    calls = [stub.ModelInfer.future(text_request("hold", str(number))) for number in range(100)]
    model = frontend.server.models["hold"]
    frontend.until(lambda: len(model.received) == 100)
    for request in reversed(model.received):
        frontend.call(lambda request=request: models()[0].behaviour(request))
    assert [text_of(call.result()) for call in calls] == [str(number) for number in range(100)]


async def test_hundred_calls_of_an_asynchronous_client(frontend):
    async with tritonclient.grpc.aio.InferenceServerClient(frontend.target) as client:

        async def call(number: int) -> bool:
            array = np.full(20_000, number, np.float32)
            tensor = triton.InferInput("INPUT0", array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            result = await client.infer("fp32", [tensor])
            return np.array_equal(result.as_numpy("OUTPUT0"), array)

        assert all(await asyncio.gather(*map(call, range(100))))


def test_slow_reader_gets_everything(frontend):
    """Responses wait in the server's queues until the client's window opens."""
    with frontend.client(initial_window_size=1 << 16) as client:
        request = array_request("fp32", np.arange(200_000, dtype=np.float32)).SerializeToString()
        client.send(frames.window_update(0, 1 << 30))
        streams = [client.new_stream() for _ in range(4)]
        for stream in streams:
            client.send(client.head(stream, headers(INFER)) + frame(0, 0, stream, message(request)[:100_000]))
            client.ping(stream.to_bytes(8, "big"))
            client.send(frame(0, frames.END_STREAM, stream, message(request)[100_000:]))
        client.ping()
        assert [len(client.answers[stream].data) for stream in streams] == [1 << 16] * 4
        for stream in streams:
            client.send(frames.window_update(stream, 1 << 22))
        for stream in streams:
            (body,) = client.answer(stream).messages()
            assert len(pb.ModelInferResponse.FromString(body).raw_output_contents[0]) == 800_000


def test_message_of_an_unfinished_request_is_enough(frontend):
    with frontend.client() as client:
        client.send(client.head(1, headers(LIVE)) + frame(frames.DATA, 0, 1, message(b"")))
        answer = client.answer(1)
        assert answer.messages() == [LIVE_ANSWER]
        client.ping()
        assert answer.reset == Http2ErrorCode.NO_ERROR


UNREADABLE = {
    "nothing": (b"", 13, "Unable to parse request"),
    "part of a prefix": (b"\0\0\0", 13, "Unable to parse request"),
    "part of a message": (b"\0\0\0\0\x09abc", 13, "Unable to parse request"),
    "no protocol buffers": (message(b"\xff\xff"), 13, "Unable to parse request"),
    "unknown flag": (b"\2\0\0\0\0", 13, "Invalid compression flag 2"),
    "compressed in no way": (message(b"x", True), 13, "Compressed message without a grpc-encoding"),
    "too large": (b"\0\x80\0\0\0", 8, "Received message larger than max (2147483648 vs. 2147483647)"),
}


@pytest.mark.parametrize(("data", "status", "text"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_message_fails_the_call(frontend, data, status, text):
    with frontend.client() as client:
        client.send(client.head(1, headers(INFER)) + frame(frames.DATA, frames.END_STREAM, 1, data))
        answer = client.answer(1)
        assert (answer.status, answer.headers["grpc-message"]) == (status, text)


def test_request_without_any_data_fails(frontend):
    with frontend.client() as client:
        client.send(client.head(1, headers(INFER), end=True))
        assert client.answer(1).status == Status.INTERNAL


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Tracing:
    """Begins a trace of each request."""

    on = True

    def begin(self, request, frontend, began, headers):
        context = json.dumps({"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
        request.trace = Mock(context=context, deliver=lambda response, deliver: deliver(response))


def test_the_access_log_has_the_trace_of_a_sampled_request(frontend, stub, monkeypatch, caplog):
    monkeypatch.setattr(logs, "current", lambda: logs.LogSettings(log_access=True))
    frontend.server.tracing = Tracing()
    with caplog.at_level("INFO", "conch"):
        stub.ModelInfer(text_request("echo", "x"))
        frontend.until(lambda: f"trace {TRACE}" in caplog.text)


# Heads


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (headers(LIVE, ("content-type", "text/html")), "415"),
        (headers(LIVE, ("content-type", "application/grpcx")), "415"),
        (headers(LIVE, method="GET"), "405"),
    ],
)
def test_what_is_not_grpc_is_refused_as_http(frontend, fields, status):
    with frontend.client() as client:
        client.send(client.head(1, fields) + frame(frames.DATA, frames.END_STREAM, 1, message(b"")))
        assert client.answer(1).headers[":status"] == status


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_content_type_may_have_a_suffix(frontend, content_type):
    with frontend.client() as client:
        stream = client.request(LIVE, b"", ("content-type", content_type))
        assert client.answer(stream).messages() == [LIVE_ANSWER]


def test_status_message_is_percent_encoded_and_cut(channel, frontend):
    call = channel.unary_unary(INFER, request_serializer=pb.ModelInferRequest.SerializeToString)
    with pytest.raises(grpc.RpcError) as caught:
        call(text_request("misbehave", "zwölf % \n drei\x7f"))
    assert caught.value.details() == "zwölf % \n drei\x7f"
    with pytest.raises(grpc.RpcError) as caught:
        call(text_request("misbehave", "é" * 10_000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "é" * 1024


# Compression


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_request_is_read(stub, compression):
    text = "again and " * 10_000
    assert text_of(stub.ModelInfer(text_request("echo", text), compression=compression)) == text


@pytest.mark.parametrize(
    ("level", "accepted", "encoding"),
    [
        ("none", "identity,deflate,gzip", None),
        ("low", "identity,deflate,gzip", "gzip"),
        ("medium", "identity,deflate,gzip", "deflate"),
        ("high", "identity,deflate,gzip", "deflate"),
        ("high", "identity, gzip", "gzip"),
        ("high", "identity", None),
        ("high", "", None),
    ],
)
def test_response_is_compressed_as_the_level_says(level, accepted, encoding):
    text = "again and " * 1000
    with Frontend(*models(), grpc_infer_response_compression_level=level) as frontend, frontend.client() as client:
        request = text_request("echo", text).SerializeToString()
        answer = client.answer(client.request(INFER, request, ("grpc-accept-encoding", accepted)))
        assert answer.headers.get("grpc-encoding") == encoding
        (body,) = answer.messages()
        if encoding:
            assert answer.data[0] == 1
            body = gzip.decompress(body) if encoding == "gzip" else zlib.decompress(body)
        assert text_of(pb.ModelInferResponse.FromString(body)) == text


def test_response_that_compression_would_enlarge_is_sent_plain():
    with Frontend(*models(), grpc_infer_response_compression_level="high") as frontend, frontend.client() as client:
        request = text_request("echo", "x").SerializeToString()
        answer = client.answer(client.request(INFER, request, ("grpc-accept-encoding", "gzip")))
        assert answer.data[0] == 0
        assert text_of(pb.ModelInferResponse.FromString(answer.messages()[0])) == "x"


def test_real_client_reads_compressed_responses():
    with Frontend(*models(), grpc_infer_response_compression_level="high") as frontend:
        with grpc.insecure_channel(frontend.target, UNLIMITED) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            text = "again and " * 1_000_000
            assert text_of(stub.ModelInfer(text_request("echo", text))) == text
            replies = stub.ModelStreamInfer(iter([text_request("echo", text)] * 2))
            assert [text_of(reply.infer_response) for reply in replies] == [text] * 2


@pytest.mark.parametrize("streamed", [False, True])
def test_response_that_is_too_large_to_be_compressed_fails_its_call(streamed, monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_SIZE", 100_000)
    with Frontend(*models(), grpc_infer_response_compression_level="high") as frontend:
        with grpc.insecure_channel(frontend.target, UNLIMITED, grpc.Compression.Gzip) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = text_request("echo", "again and " * 15_000)
            with pytest.raises(grpc.RpcError) as caught:
                if streamed:
                    list(stub.ModelStreamInfer(iter([request]), timeout=60))
                else:
                    stub.ModelInfer(request, timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "exceeds gRPC's byte size limit 100000" in caught.value.details()
        frontend.until(lambda: not frontend.budget.used)


def test_unknown_compression_is_refused_with_those_that_are_known(frontend):
    with frontend.client() as client:
        answer = client.answer(client.request(LIVE, b"", ("grpc-encoding", "zstd")))
        assert answer.status == Status.UNIMPLEMENTED
        assert answer.headers["grpc-accept-encoding"] == "identity,deflate,gzip"


@pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b"")[:-3], b""])
def test_broken_compression_fails_the_call(frontend, data):
    with frontend.client() as client:
        stream = client.new_stream()
        client.send(
            client.head(stream, headers(LIVE, ("grpc-encoding", "gzip")))
            + frame(frames.DATA, frames.END_STREAM, stream, message(data, True))
        )
        answer = client.answer(stream)
        assert answer.status == Status.INTERNAL
        assert answer.headers["grpc-message"] == "Unexpected error decompressing data for algorithm gzip"


@pytest.mark.parametrize("path", [LIVE, INFER, STREAM_INFER])
def test_decompression_bomb_is_stopped(path):
    with Frontend(*models(), grpc_max_decompressed_size=10_000) as frontend, frontend.client() as client:
        stream = client.new_stream()
        client.send(
            client.head(stream, headers(path, ("grpc-encoding", "deflate")))
            + frame(frames.DATA, frames.END_STREAM, stream, message(zlib.compress(bytes(1_000_000)), True))
        )
        answer = client.answer(stream)
        assert answer.status == Status.RESOURCE_EXHAUSTED
        assert "--grpc-max-decompressed-size" in answer.headers["grpc-message"]


# Deadlines and cancellation


def test_deadline_ends_the_call_and_cancels_the_request(frontend):
    model = frontend.server.models["hold"]
    with frontend.client() as client:
        request = text_request("hold", "x").SerializeToString()
        answer = client.answer(client.request(INFER, request, ("grpc-timeout", "20m")))
        assert (answer.status, answer.headers["grpc-message"]) == (Status.DEADLINE_EXCEEDED, "Deadline Exceeded")
        assert model.cancelled == model.received != []


def test_call_without_any_time_does_not_begin(frontend):
    with frontend.client() as client:
        request = text_request("echo", "x").SerializeToString()
        assert client.answer(client.request(INFER, request, ("grpc-timeout", "0n"))).status == Status.DEADLINE_EXCEEDED
    assert not frontend.server.models["echo"].received


def test_answer_in_time_is_not_disturbed_by_a_deadline(frontend):
    with frontend.client() as client:
        for timeout in ("10S", "999999999999999H", "123456789S", "nonsense"):
            stream = client.request(LIVE, b"", ("grpc-timeout", timeout))
            assert client.answer(stream).messages() == [LIVE_ANSWER]


def test_cancelled_call_cancels_its_request_only(frontend, stub):
    model = frontend.server.models["hold"]
    first, second = [stub.ModelInfer.future(text_request("hold", text)) for text in ("first", "second")]
    frontend.until(lambda: len(model.received) == 2)
    first.cancel()
    frontend.until(lambda: model.cancelled)
    assert len(model.cancelled) == 1
    (left,) = [request for request in model.received if not request.cancelled]
    frontend.call(models()[0].behaviour, left)
    assert text_of(second.result()) == "second"


def test_lost_connection_cancels_its_requests(frontend):
    model = frontend.server.models["hold"]
    with frontend.client() as client:
        for _ in range(3):
            client.request(INFER, text_request("hold", "x").SerializeToString())
        client.ping()
        assert len(model.received) == 3
    frontend.until(lambda: len(model.cancelled) == 3)


def test_connection_lost_in_the_middle_of_a_message_leaves_nothing_behind(frontend):
    with frontend.client() as client:
        client.send(client.head(1, headers(INFER)) + frame(frames.DATA, 0, 1, message(bytes(1_000_000))[:50_000]))
        client.send(frames.FRAME.pack(100_000 << 8, 0, 1) + bytes(10_000))
        client.reset_connection()
    frontend.until(lambda: not frontend.frontend.connections)
    assert not any(model.received for model in frontend.server.models.values())


def test_response_after_the_client_has_gone_is_dropped(frontend):
    model = frontend.server.models["hold"]
    model.cancel = lambda request: model.cancelled.append(request)
    with frontend.client() as client:
        client.request(INFER, text_request("hold", "x").SerializeToString())
        client.ping()
    frontend.until(lambda: model.cancelled)
    frontend.call(models()[0].behaviour, model.received[0])
    with frontend.client() as client:
        assert client.answer(client.request(LIVE, b"")).messages() == [LIVE_ANSWER]


# Large messages


def typed_request(count: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="fp32")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[count])
    tensor.contents.fp32_contents.extend([1.5] * count)
    return request


def test_typed_contents_of_any_size_are_read(stub):
    for count in (10, 300_000):
        response = stub.ModelInfer(typed_request(count))
        assert response.raw_output_contents[0] == np.full(count, 1.5, np.float32).tobytes()


def test_large_messages_of_a_stream_keep_their_order(stub):
    """The first is decoded elsewhere; the small one behind it must not overtake it."""
    requests = [typed_request(300_000), array_request("fp32", np.zeros(1, np.float32))]
    for compression in (None, grpc.Compression.Gzip):
        replies = stub.ModelStreamInfer(iter(requests * 2), compression=compression)
        sizes = [len(reply.infer_response.raw_output_contents[0]) for reply in replies]
        assert sizes == [1_200_000, 4] * 2


def test_large_compressed_answers_keep_their_place():
    with Frontend(*models(), grpc_infer_response_compression_level="high") as frontend:
        with grpc.insecure_channel(frontend.target, UNLIMITED) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            requests = [text_request("echo", text) for text in ("a" * 500_000, "b", "c" * 200_000, "d")]
            replies = stub.ModelStreamInfer(iter([*requests, text_request("unknown", "e")]))
            *texts, last = replies
            assert [text_of(reply.infer_response)[0] for reply in texts] == ["a", "b", "c", "d"]
            assert "unknown" in last.error_message
        frontend.until(lambda: not frontend.budget.used)


def test_client_that_hangs_up_while_its_message_is_decoded_leaves_nothing_behind(frontend):
    body = typed_request(300_000).SerializeToString()
    with frontend.client() as client:
        client.send(client.head(1, headers(INFER)) + frame(frames.DATA, 0, 1, message(body)[:250_000]))
        client.ping()
        client.send(frame(frames.DATA, frames.END_STREAM, 1, message(body)[250_000:]))
        client.reset_connection()
    frontend.until(lambda: not frontend.frontend.connections and not frontend.budget.used)


def test_a_request_whose_call_is_refused_for_bytes_is_cancelled(frontend):
    with frontend.client() as client:
        stream = client.new_stream()
        body = message(text_request("hold", "x").SerializeToString())
        client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, body))
        model = frontend.server.models["hold"]
        frontend.until(lambda: model.received)
        frontend.call(frontend.budget.take, 2 * frontend.budget.size)
        client.send(frame(frames.DATA, 0, stream, bytes(2000)))
        assert client.answer(stream).status == Status.RESOURCE_EXHAUSTED.value
        frontend.until(lambda: model.cancelled == model.received)
        frontend.call(frontend.budget.release, 2 * frontend.budget.size)


def test_a_message_that_has_come_after_all_is_not_refused_for_bytes(frontend):
    data = message(array_request("fp32", np.zeros(100_000, np.float32)).SerializeToString())
    model = frontend.server.models["fp32"]
    model.behaviour = hold
    with frontend.client() as client:
        stream = client.new_stream()
        client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, data[:100_000]))
        client.ping()
        frontend.call(setattr, frontend.budget, "timeout", 0.0)
        frontend.call(frontend.budget.take, frontend.budget.size)
        client.send(frame(frames.DATA, 0, stream, data[100_000:200_000]))
        client.send(frame(frames.DATA, frames.END_STREAM, stream, data[200_000:]))
        frontend.until(lambda: model.received)
        frontend.wait(asyncio.sleep(0.2))  # the budget looks for whom to refuse
        frontend.call(model.received[0].fail, invalid("as the model says"))
        assert client.answer(stream).status == Status.INVALID_ARGUMENT.value


def test_control_message_that_is_too_large_is_refused(frontend):
    with frontend.client() as client:
        stream = client.new_stream()
        body = message(b"\x0a" + bytes(1_000_000))
        client.send(client.head(stream, headers("/inference.GRPCInferenceService/RepositoryIndex")))
        client.send(frame(frames.DATA, 0, stream, body[:200_000]))
        client.ping()
        client.send(frame(frames.DATA, frames.END_STREAM, stream, body[200_000:]))
        assert client.answer(stream).status == Status.RESOURCE_EXHAUSTED
