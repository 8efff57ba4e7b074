"""Where requests through Ray Serve's proxies are led, and what becomes of their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from starlette.requests import Request
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse

from conch.deploy.ray import entry as module
from conch.deploy.ray.affinity import of_prompt
from conch.deploy.ray.entry import ServeEntry, StreamFailed
from conch.deploy.ray.relay import HttpHead, RpcError
from conch.deploy.ray.service import UNARY, RawMessage
from tests.unit.deploy.ray.records import until


class Handle:
    """Takes the place of Ray Serve's handle of a deployment; ``calls`` have the options and arguments of each call."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.calls: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._answer = answer
        self._options: dict[str, Any] = {}

    def options(self, **options: Any) -> Handle:
        other = Handle(self._answer)
        other.calls, other._options = self.calls, {**self._options, **options}
        return other

    def remote(self, *arguments: Any) -> Any:
        self.calls.append((self._options, arguments))
        answer = self._answer(*arguments)
        return Responses(answer) if isinstance(answer, AsyncGenerator) else answer


class Responses:
    """Takes the place of Ray Serve's ``DeploymentResponseGenerator``: only ``cancel`` ends what is asked."""

    def __init__(self, answers: AsyncGenerator[Any, None]) -> None:
        self._answers = answers
        self._next: asyncio.Task[Any] | None = None

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> Any:
        self._next = asyncio.ensure_future(anext(self._answers, Responses))
        answer = await asyncio.shield(self._next)
        if answer is Responses:
            raise StopAsyncIteration
        return answer

    def cancel(self) -> None:
        assert self._next is not None
        self._next.cancel()


class Context:
    """Takes the place of the context of a call."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self.code: Any = None
        self.details = ""
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


async def http_answer(*_: Any) -> AsyncIterator[HttpHead | bytes]:
    yield HttpHead(201, [("X-One", "1"), ("content-type", "text/plain")])
    yield b"first "
    yield b"second"


async def rpc_answer(*_: Any) -> bytes:
    return b"answer"


def handles(answer: Callable[..., Any], shared: bool = False) -> tuple[ServeEntry, Handle, Handle]:
    """An entry, the handle of its one model ``a model``, and that of the ingress."""
    model, ingress = Handle(answer), Handle(answer)
    return ServeEntry({"a model": model}, ingress, shared), model, ingress


def request(path: str, body: bytes = b"", query: str = "", method: str = "POST", **headers: str) -> Request:
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(scope, receive)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/a%20model/infer",
        "/v2/models/a%20model/versions/1/infer",
        "/v2/models/a%20model/generate",
        "/v2/models/a%20model/generate_stream",
    ],
)
async def test_a_request_for_a_model_goes_to_its_replicas(path: str) -> None:
    entry, model, ingress = handles(http_answer)
    body = json.dumps({"text_input": "hello"}).encode()
    answer = await entry(request(path, body, "x=%20y", Content_Type="text/x"))
    ((options, (method, target, headers, sent)),) = model.calls
    assert options == {"method_name": "http", "stream": True, "session_id": of_prompt(b"hello")}
    assert (method, target, sent, ingress.calls) == ("POST", f"{path}?x=%20y", body, [])
    assert list(headers) == [("content-type", "text/x")]
    assert (answer.status_code, answer.headers["x-one"]) == (201, "1")
    assert [chunk async for chunk in answer.body_iterator] == [b"first ", b"second"]


@pytest.mark.parametrize(
    "path",
    [
        "/v2/health/ready",
        "/v2/models/a%20model",
        "/v2/models/a%20model/ready",
        "/v2/models/a%20model/infer/more",
        "/v2/models/unknown/infer",
        "/v2/models/a/model/infer",
        "/v1/chat/completions",
    ],
)
async def test_whatever_is_for_no_one_model_goes_to_an_ingress(path: str) -> None:
    entry, model, ingress = handles(http_answer)
    await entry(request(path, method="GET"))
    ((options, (_, target, _, _)),) = ingress.calls
    assert options == {"method_name": "http", "stream": True}
    assert (target, model.calls) == (path, [])


@pytest.mark.parametrize(
    ("length", "session"),
    [("34", "sequence 7"), ("", ""), ("none", ""), ("9" * 5000, ""), ("²", ""), ("-1", "")],
)
async def test_a_length_of_the_json_that_means_nothing_is_the_replicas_affair(length: str, session: str) -> None:
    entry, model, _ = handles(http_answer)
    body = json.dumps({"parameters": {"sequence_id": 7}}).encode()
    assert len(body) == 34
    path = "/v2/models/a%20model/infer"
    await entry(request(path, body + b"\x00\x01", Inference_Header_Content_Length=length.encode().decode("latin-1")))
    assert model.calls[0][0]["session_id"] == session


async def test_where_models_share_replicas_ray_serve_is_told_which_one_it_is() -> None:
    entry, model, _ = handles(http_answer, shared=True)
    await entry(request("/v2/models/a%20model/infer"))
    assert model.calls[0][0]["multiplexed_model_id"] == "a model"


def infer(name: str = "a model", sequence: int = 0, id: str = "") -> bytes:
    message = ModelInferRequest(model_name=name, id=id)
    if sequence:
        message.parameters["sequence_id"].int64_param = sequence
    return bytes(message.SerializeToString())


async def test_a_call_goes_to_the_replicas_of_its_model_with_what_is_for_the_server() -> None:
    entry, model, _ = handles(rpc_answer)
    kept = [("triton_x", "1"), ("conch_grpc_error", "true"), ("x-key", "secret"), ("x-bin", b"2")]
    context = Context(*kept, ("application", "conch"), ("user-agent", "grpc"), ("grpc-accept-encoding", "gzip"))
    answer = await entry.ModelInfer(infer(sequence=7), context)
    assert answer.SerializeToString() == b"answer"
    (options, arguments) = model.calls[0]
    assert options == {"method_name": "rpc", "session_id": "sequence 7"}
    assert arguments == ("ModelInfer", infer(sequence=7), kept)


@pytest.mark.parametrize("message", [infer("unknown"), b"\xff\xff no message"])
async def test_a_call_that_is_for_no_model_goes_to_an_ingress(message: bytes) -> None:
    entry, model, ingress = handles(rpc_answer)
    await entry.ModelInfer(message, Context())
    assert ingress.calls[0][1] == ("ModelInfer", message, [])
    assert model.calls == []


@pytest.mark.parametrize("method", [name for name in UNARY if name != "ModelInfer"])
async def test_all_other_calls_go_to_an_ingress(method: str) -> None:
    entry, _, ingress = handles(rpc_answer)
    await getattr(entry, method)(b"message", Context())
    assert ingress.calls == [({"method_name": "rpc"}, (method, b"message", []))]


async def test_the_status_of_a_call_that_fails_is_the_clients() -> None:
    async def answer(*_: Any) -> RpcError:
        return RpcError("NOT_FOUND", "no such model")

    entry, _, _ = handles(answer)
    context = Context()
    assert (await entry.ModelInfer(infer(), context)).SerializeToString() == b""
    assert (context.code, context.details) == (grpc.StatusCode.NOT_FOUND, "no such model")


class Replicas:
    """Answers streams when it is told to."""

    def __init__(self) -> None:
        self.came: list[ModelInferRequest] = []
        self.cancelled: list[str] = []
        self._go: dict[str, asyncio.Event] = {}

    def go(self, id: str) -> asyncio.Event:
        return self._go.setdefault(id, asyncio.Event())

    async def answer(self, method: str, message: bytes, metadata: object) -> AsyncIterator[bytes | RpcError]:
        request = ModelInferRequest.FromString(message)
        self.came.append(request)
        try:
            await self.go(request.id).wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        if request.id == "dies":
            raise RuntimeError("the actor died\nwith a long traceback")
        if request.id == "refused":
            yield RpcError("INVALID_ARGUMENT", "no good")
            return
        for number in range(2):
            yield f"{request.id} {number}".encode()

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.came]


class Stream:
    """A client's stream through an entry."""

    def __init__(self, replicas: Replicas) -> None:
        self.entry, self.model, self.ingress = handles(replicas.answer)
        self.context = Context(("triton_x", "1"))
        self.got: list[bytes] = []
        self._sent: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._gone = False
        self.ended = asyncio.ensure_future(self._run())

    def send(self, *messages: bytes | BaseException | None) -> None:
        for message in messages:
            self._sent.put_nowait(message)

    def hang_up(self) -> None:
        """Have the client gone where Ray Serve tells of it at the end of what it has sent."""
        self._gone = True
        self._sent.put_nowait(None)

    def is_cancelled(self) -> bool:
        return self._gone

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._sent.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            yield message

    async def _run(self) -> None:
        answers = self.entry.ModelStreamInfer(self, self.context)
        try:
            async for answer in answers:
                self.got.append(answer.SerializeToString())
        finally:
            await answers.aclose()  # type: ignore[attr-defined]


async def test_a_stream_ends_when_all_is_answered() -> None:
    replicas = Replicas()
    stream = Stream(replicas)
    stream.send(infer(id="a"), infer(id="b"), None)
    await until(lambda: replicas.ids == ["a", "b"])  # both are under way
    replicas.go("b").set()
    await until(lambda: stream.got == [b"b 0", b"b 1"])
    replicas.go("a").set()
    await stream.ended
    assert stream.got[2:] == [b"a 0", b"a 1"]
    assert stream.model.calls[0][0] == {"method_name": "rpc_stream", "stream": True, "session_id": ""}
    assert stream.model.calls[0][1] == ("ModelStreamInfer", infer(id="a"), [("triton_x", "1")])


async def test_a_stream_without_requests_ends() -> None:
    stream = Stream(Replicas())
    stream.send(None)
    await stream.ended
    assert stream.got == []


async def test_requests_of_one_sequence_run_after_each_other_and_others_beside_them() -> None:
    replicas = Replicas()
    stream = Stream(replicas)
    stream.send(infer(id="a", sequence=1), infer(id="b", sequence=1), infer(id="c", sequence=2), None)
    await until(lambda: replicas.ids == ["a", "c"])
    replicas.go("a").set()
    await until(lambda: replicas.ids == ["a", "c", "b"])
    replicas.go("b").set()
    replicas.go("c").set()
    await stream.ended
    assert [one for one in stream.got if not one.startswith(b"c")] == [b"a 0", b"a 1", b"b 0", b"b 1"]


async def test_a_request_of_a_stream_for_no_model_goes_to_an_ingress() -> None:
    replicas = Replicas()
    replicas.go("").set()
    stream = Stream(replicas)
    stream.send(infer("unknown"), None)
    await stream.ended
    assert len(stream.ingress.calls) == 1 and not stream.model.calls


async def test_a_replica_that_dies_fails_its_request_and_no_other() -> None:
    replicas = Replicas()
    stream = Stream(replicas)
    for id in ("dies", "lives"):
        replicas.go(id).set()
    stream.send(infer(id="dies", sequence=1), infer(id="lives", sequence=1), None)
    await stream.ended
    failed = ModelStreamInferResponse.FromString(stream.got[0])
    assert failed.infer_response.id == "dies"
    assert failed.error_message == "no answer from the replica: the actor died with a long traceback"
    assert stream.got[1:] == [b"lives 0", b"lives 1"]


async def test_a_status_with_which_a_server_ends_a_stream_is_the_clients() -> None:
    replicas = Replicas()
    stream = Stream(replicas)
    replicas.go("refused").set()
    stream.send(infer(id="waits"), infer(id="refused"))
    with pytest.raises(
        StreamFailed, match="no good"
    ):  # Ray Serve sends the status of a stream that raises, and no other
        await stream.ended
    assert (stream.context.code, stream.context.details) == (grpc.StatusCode.INVALID_ARGUMENT, "no good")
    await until(lambda: replicas.cancelled == ["waits"])


async def test_a_stream_that_breaks_ends_with_a_status() -> None:
    stream = Stream(Replicas())
    stream.send(RuntimeError("the proxy is gone"))
    with pytest.raises(StreamFailed):
        await stream.ended
    assert (stream.context.code, stream.context.details) == (grpc.StatusCode.UNAVAILABLE, "the proxy is gone")


async def test_a_client_that_hangs_up_cancels_what_is_under_way() -> None:
    replicas = Replicas()
    stream = Stream(replicas)
    stream.send(infer(id="a"), infer(id="b"))
    await until(lambda: len(replicas.came) == 2)
    stream.ended.cancel()
    await until(lambda: sorted(replicas.cancelled) == ["a", "b"])


@pytest.mark.parametrize("end", [Stream.hang_up, lambda stream: stream.send(asyncio.CancelledError())])
async def test_a_client_that_hangs_up_between_two_answers_cancels_what_is_under_way(
    end: Callable[[Stream], None],
) -> None:
    replicas = Replicas()
    stream = Stream(replicas)
    stream.send(infer(id="a"), infer(id="b"))
    await until(lambda: len(replicas.came) == 2)
    end(stream)
    await stream.ended
    await until(lambda: sorted(replicas.cancelled) == ["a", "b"])


async def test_a_client_that_sends_more_than_is_answered_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD", 2)
    replicas = Replicas()
    stream = Stream(replicas)
    stream.send(*(infer(id=str(number)) for number in range(5)), None)
    await until(lambda: len(replicas.came) == 2)
    await until(lambda: stream._sent.qsize() == 3)
    assert replicas.ids == ["0", "1"]
    for number in range(5):
        replicas.go(str(number)).set()
    await stream.ended
    assert len(stream.got) == 10


def test_answers_can_be_sent_between_processes() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(RawMessage(b"x"))).SerializeToString() == b"x"
