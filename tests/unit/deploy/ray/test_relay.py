"""What is passed on to the server in the process, and back."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)

import conch
from conch.deploy.ray.relay import Headers, HttpHead, Relay, RpcError
from conch.tensors import pack_bytes
from tests.unit.deploy.ray.records import until
from tests.unit.deploy.ray.servers import serving, write_counting, write_echo

JSON = ("content-type", "application/json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[conch.Server]:
    repository = tmp_path_factory.mktemp("models")
    write_echo(repository)
    write_counting(repository)
    with serving(repository) as server:
        yield server


@pytest.fixture
async def relay(server: conch.Server) -> AsyncIterator[Relay]:
    relay = Relay(server.urls["http"], server.urls["grpc"])
    yield relay
    await relay.close()


async def fetched(relay: Relay, method: str, target: str, *headers: tuple[str, str], body: bytes = b"") -> Any:
    """The head of an answer and its whole body."""
    parts = [part async for part in relay.http(method, target, headers, body)]
    assert isinstance(parts[0], HttpHead)
    return parts[0], b"".join(part for part in parts[1:] if isinstance(part, bytes))


async def test_answers_over_http_come_as_they_are(relay: Relay) -> None:
    body = b'{"text_input": "hello"}'
    head, answer = await fetched(
        relay,
        "POST",
        "/v2/models/echo/generate",
        JSON,
        ("Content-Length", str(len(body))),
        ("Host", "other"),
        body=body,
    )
    assert (head.status, json.loads(answer)["OUT"]) == (200, "echo hello")
    names = {name.lower() for name, _ in head.headers}
    assert "content-type" in names and not names & {"connection", "transfer-encoding", "keep-alive"}
    head, answer = await fetched(relay, "GET", "/v2/models/none%2F/ready?x=%20")
    assert head.status == 400


async def test_binary_tensors_are_passed_on_untouched(relay: Relay) -> None:
    data = pack_bytes([b"\x7f \x00"])
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    header = json.dumps(
        {"inputs": [tensor], "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]}
    ).encode()
    length = ("Inference-Header-Content-Length", str(len(header)))
    head, answer = await fetched(relay, "POST", "/v2/models/echo/infer", length, body=header + data)
    assert head.status == 200
    assert answer.endswith(pack_bytes([b"echo \x7f \x00"]))


async def test_a_stream_over_http_comes_piece_by_piece(relay: Relay) -> None:
    body = b'{"text_input": "3"}'
    _, answer = await fetched(relay, "POST", "/v2/models/count/generate_stream", JSON, body=body)
    lines = [line for line in answer.decode().splitlines() if line]
    assert [json.loads(line.removeprefix("data: "))["OUT"] for line in lines] == ["0", "1", "2"]


async def test_a_client_that_hangs_up_is_noticed_by_the_model(relay: Relay, tmp_path: Path) -> None:
    body = json.dumps({"text_input": f"100000 {tmp_path / 'gone'}"}).encode()
    async with aclosing(relay.http("POST", "/v2/models/count/generate_stream", [JSON], body)) as parts:
        assert isinstance(await anext(parts), HttpHead)
        await anext(parts)
    await until((tmp_path / "gone").exists)


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    """The URL of a server that answers with the head of the request."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = [[name.lower(), value] for name, value in request.headers.items()]
        seen = json.dumps({"target": request.raw_path, "headers": headers, "size": len(body)}).encode()
        return web.Response(body=gzip.compress(seen), headers={"Content-Encoding": "gzip", "Set-Cookie": "a=b"})

    runner = web.AppRunner(web.Application())
    runner.app.router.add_route("*", "/{tail:.*}", answer)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def said(relay: Relay, headers: Headers = (), body: bytes = b"") -> dict[str, Any]:
    head, answer = await fetched(relay, "POST", "/a%20b/%2F?x=%20&y", *headers, body=body)
    assert ("Content-Encoding", "gzip") in head.headers  # the body is as the server sent it
    found: dict[str, Any] = json.loads(gzip.decompress(answer))
    return found


async def test_nothing_is_said_in_the_name_of_a_client(echo: str) -> None:
    relay = Relay(echo, "grpc://127.0.0.1:1")
    sent = [("X-One", "1"), ("x-two", "2"), ("Expect", "100-continue"), ("TE", "trailers"), ("Connection", "close")]
    for _ in range(2):  # also when a cookie was set
        found = await said(relay, sent, b"body")
        assert (found["target"], found["size"]) == ("/a%20b/%2F?x=%20&y", 4)
        names = {name: value for name, value in found["headers"] if name not in ("host", "content-length")}
        assert names == {"x-one": "1", "x-two": "2"}
    await relay.close()


async def test_a_server_that_is_gone_is_an_error_of_its_own() -> None:
    relay = Relay("http://127.0.0.1:1", "grpc://127.0.0.1:1")
    head, answer = await fetched(relay, "GET", "/v2/health/ready")
    assert (head.status, "the server does not answer" in json.loads(answer)["error"]) == (503, True)
    failed = await relay.rpc("ServerReady", b"", ())
    assert isinstance(failed, RpcError) and failed.code == "UNAVAILABLE"
    (streamed,) = [answer async for answer in relay.rpc_stream("ModelStreamInfer", b"", ())]
    assert isinstance(streamed, RpcError) and streamed.code == "UNAVAILABLE"
    await relay.close()


def message(name: str, text: str) -> bytes:
    request = ModelInferRequest(model_name=name, id="7")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(pack_bytes([text.encode()]))
    return bytes(request.SerializeToString())


async def test_a_call_is_answered(relay: Relay) -> None:
    ready = await relay.rpc("ServerReady", ServerReadyRequest().SerializeToString(), ())
    assert isinstance(ready, bytes) and ServerReadyResponse.FromString(ready).ready
    answer = await relay.rpc("ModelInfer", message("echo", "hello"), [("triton_x", "1")])
    assert isinstance(answer, bytes)
    assert ModelInferResponse.FromString(answer).raw_output_contents[0] == pack_bytes([b"echo hello"])


@pytest.mark.parametrize(
    ("sent", "code", "details"),
    [
        (message("none", "x"), "NOT_FOUND", "Request for unknown model: 'none' is not found"),
        (message("echo", "fail"), "INTERNAL", "as it was told"),
        (b"\xff\xff", "INTERNAL", ""),
    ],
)
async def test_the_status_of_a_call_that_fails_comes_with_its_words(
    relay: Relay, sent: bytes, code: str, details: str
) -> None:
    failed = await relay.rpc("ModelInfer", sent, ())
    assert isinstance(failed, RpcError)
    assert (failed.code, details in failed.details) == (code, True)


async def test_the_answers_of_a_stream_come_in_their_order(relay: Relay) -> None:
    found = [answer async for answer in relay.rpc_stream("ModelStreamInfer", message("count", "3"), ())]
    outputs = [
        ModelStreamInferResponse.FromString(answer).infer_response for answer in found if isinstance(answer, bytes)
    ]
    assert [one.raw_output_contents[0] for one in outputs] == [pack_bytes([text]) for text in (b"0", b"1", b"2")]


async def test_an_error_of_a_request_in_a_stream_is_a_message(relay: Relay) -> None:
    (answer,) = [answer async for answer in relay.rpc_stream("ModelStreamInfer", message("none", "x"), ())]
    assert isinstance(answer, bytes)
    assert "unknown model" in ModelStreamInferResponse.FromString(answer).error_message


async def test_a_client_that_leaves_its_stream_is_noticed_by_the_model(relay: Relay, tmp_path: Path) -> None:
    sent = message("count", f"100000 {tmp_path / 'gone'}")
    async with aclosing(relay.rpc_stream("ModelStreamInfer", sent, ())) as answers:
        await anext(answers)
    await until((tmp_path / "gone").exists)


async def test_a_relay_that_is_closed_leaves_no_connection(server: conch.Server) -> None:
    relay = Relay(server.urls["http"], server.urls["grpc"])
    await fetched(relay, "GET", "/v2/health/ready")
    await relay.close()
    with pytest.raises((aiohttp.ClientError, RuntimeError)):
        await fetched(relay, "GET", "/v2/health/ready")
