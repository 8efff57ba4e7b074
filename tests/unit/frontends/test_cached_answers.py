"""A model behind the response cache, over every front end: what was sent before is sent again where it fits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from conch.library.app import Application
from conch.options.settings import Settings
from conch.options.triton_values import Setting
from tests.models import build
from tests.unit.frontends.http.site import Client

#: By port: the path of a request, and the header of a binary response before the size of its JSON.
PORTS = {
    "http": ("/v2/models/identity_fp32/infer", "inference-header-content-length", ""),
    "sagemaker": ("/invocations", "content-type", "application/vnd.sagemaker-triton.binary+json;json-header-size="),
    "vertex-ai": ("/predicted", "inference-header-content-length", ""),
    "oci": ("/predict", "inference-header-content-length", ""),
}


class CachedModel:
    """``identity_fp32`` behind a cache of 20,000 bytes, on all ports."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, port: str = "http") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.application.addresses[port][1])
        self._writers.append(writer)
        return Client(reader, writer)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CachedModel]:
    monkeypatch.setenv("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "identity_fp32")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predicted")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/health")
    config = build(tmp_path, "identity_fp32") / "identity_fp32" / "config.pbtxt"
    config.write_text(config.read_text() + "response_cache { enable: true }\n")
    application = Application(
        Settings(
            model_repository=(str(tmp_path),),
            model_control_mode="explicit",
            load_model=("identity_fp32",),
            cache_config=(Setting("local", "size", "20000"),),
            http_port=0,
            grpc_port=0,
            allow_sagemaker=True,
            sagemaker_port=0,
            allow_vertex_ai=True,
            vertex_ai_port=0,
            allow_oci=True,
            oci_port=0,
            allow_metrics=False,
        )
    )
    await application.listen()
    await application.load_models()
    model = CachedModel(application)
    yield model
    model.close()
    await application.stop(0)


def request(number: float = 1, path: str = "/v2/models/identity_fp32/infer", binary: bool = False) -> bytes:
    parameters = {"parameters": {"binary_data_output": True}} if binary else {}
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [number]}
    body = json.dumps({"inputs": [tensor], **parameters}).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


async def unload(client: Client) -> None:
    client.send(b"POST /v2/repository/models/identity_fp32/unload HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert (await client.response())[0] == 200


async def states(client: Client) -> list[tuple[str, str]]:
    client.send(b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    index: list[dict[str, Any]] = json.loads((await client.response())[2])
    return [(model["name"], model["state"]) for model in index]


async def until_unloaded(client: Client) -> None:
    async with asyncio.timeout(30):
        while await states(client) != [("identity_fp32", "UNAVAILABLE")]:
            await asyncio.sleep(0)


async def test_same_request_of_two_http_clients_at_once_is_evicted_and_unloaded(cached: CachedModel) -> None:
    first, second = await cached.connect(), await cached.connect()
    first.send(request())
    answer = (await first.response())[2]
    for client in (first, second):
        client.send(request())
    assert [(await client.response())[2] for client in (first, second)] == [answer, answer]
    for number in range(100):  # more than the cache holds
        first.send(request(number))
        assert (await first.response())[0] == 200
    for client in (first, second):
        client.send(request())
    assert [(await client.response())[2] for client in (first, second)] == [answer, answer]
    await unload(first)
    await until_unloaded(first)


async def test_same_request_of_two_grpc_calls_at_once_is_unloaded(cached: CachedModel) -> None:
    host, port = cached.application.addresses["grpc"]
    message = service_pb2.ModelInferRequest(model_name="identity_fp32")
    message.inputs.add(name="INPUT", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        first = await stub.ModelInfer(message)
        for _ in range(4):
            assert list(await asyncio.gather(*(stub.ModelInfer(message) for _ in range(8)))) == [first] * 8
    client = await cached.connect()
    await unload(client)
    await until_unloaded(client)


@pytest.mark.parametrize("first", PORTS)
async def test_binary_answer_has_the_header_of_the_port_that_was_asked(cached: CachedModel, first: str) -> None:
    clients = {port: await cached.connect(port) for port in (first, *PORTS)}
    for port in (*clients, *clients, *clients):
        path, header, kind = PORTS[port]
        clients[port].send(request(path=path, binary=True))
        status, headers, body = await clients[port].response()
        size = len(body) - 4
        assert status == 200 and json.loads(body[:size])["model_name"] == "identity_fp32"
        assert headers[header] == f"{kind}{size}"
    [version] = cached.application.server.statistics("identity_fp32")
    assert version["inference_stats"]["cache_hit"]["count"] == 3 * len(PORTS) - 1
