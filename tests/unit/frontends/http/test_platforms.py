"""Platforms: what their environment has to say, and models that SageMaker has loaded, listed and unloaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from conch.core.errors import ConchError, unavailable
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.platforms import OciDataScience, SageMaker, SageMakerModels, VertexAi, check_ports, only_model
from conch.library.app import Application
from conch.options.settings import Settings, platform_defaults
from tests.events import until
from tests.models import build
from tests.unit.frontends.http.site import Client, WrittenConnection


class Models:
    """A server as far as its names go."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def ready_models(self) -> list[str]:
        return self.names


def test_vertex_ai_needs_its_routes() -> None:
    for environment, missing in (({}, "AIP_PREDICT_ROUTE"), ({"AIP_PREDICT_ROUTE": "/p"}, "AIP_HEALTH_ROUTE")):
        with pytest.raises(ConchError, match=f"{missing} is not defined for Vertex AI endpoint"):
            VertexAi(environment, lambda: "m")


def test_vertex_ai_takes_the_only_model_where_none_is_named() -> None:
    assert only_model(Models("a"), "") == "a"  # type: ignore[arg-type]
    assert only_model(Models("a", "b"), "b") == "b"  # type: ignore[arg-type]
    for names in ((), ("a", "b")):
        with pytest.raises(ConchError, match="contains only a single model if default model is not specified"):
            only_model(Models(*names), "")  # type: ignore[arg-type]


def test_vertex_ai_is_served_alone_where_its_environment_says_so() -> None:
    assert platform_defaults({"AIP_MODE": "TRAINING"}) == {}
    assert platform_defaults({"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "7080"}) == {
        "vertex-ai-port": ("7080",),
        "allow-vertex-ai": ("true",),
        "allow-http": ("false",),
        "allow-grpc": ("false",),
    }


def test_sagemaker_pings_as_its_environment_says() -> None:
    SageMaker({"SAGEMAKER_TRITON_PING_MODE": "live"}, ())
    with pytest.raises(ConchError, match="SAGEMAKER_TRITON_PING_MODE is 'dead'; it must be 'live' or 'ready'"):
        SageMaker({"SAGEMAKER_TRITON_PING_MODE": "dead"}, ())


def test_other_ports_are_where_sagemaker_allows_them() -> None:
    ports: Any = {"http_port": 8100, "metrics_port": 8102, "sagemaker_safe_port_range": ((8100, 8102),)}
    check_ports(Settings(grpc_port=8101, **ports))
    check_ports(Settings(grpc_port=9000))
    check_ports(Settings(grpc_port=9000, allow_grpc=False, **ports))
    with pytest.raises(ConchError, match="--grpc-port=9000 is outside of --sagemaker-safe-port-range=8100-8102"):
        check_ports(Settings(grpc_port=9000, **ports))


def test_sagemaker_infers_or_generates_as_its_environment_says() -> None:
    SageMaker({"SAGEMAKER_TRITON_INFERENCE_TYPE": "generate_stream"}, ())
    message = "SAGEMAKER_TRITON_INFERENCE_TYPE is 'chat'; it must be one of infer, generate, generate_stream"
    with pytest.raises(ConchError, match=message):
        SageMaker({"SAGEMAKER_TRITON_INFERENCE_TYPE": "chat"}, ())


def test_oci_maps_its_endpoints_to_paths_only() -> None:
    OciDataScience({"MODEL_DEPLOY_PREDICT_ENDPOINT": "/v1/completions"}, lambda: "m")
    with pytest.raises(ConchError, match="MODEL_DEPLOY_HEALTH_ENDPOINT is 'health', and must be a path that begins"):
        OciDataScience({"MODEL_DEPLOY_HEALTH_ENDPOINT": "health"}, lambda: "m")


def test_the_flag_that_names_a_platforms_model_is_reported() -> None:
    with pytest.raises(ConchError, match="--oci-default-model names it"):
        only_model(Models("a", "b"), "", "oci-default-model")  # type: ignore[arg-type]


class SageMakerPort:
    """SageMaker's port of an application."""

    def __init__(self, application: Application, client: Client, models: Path) -> None:
        self.application = application
        self.models = models
        self._client = client

    async def ask(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        body = b"" if document is None else json.dumps(document).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: endpoint.example.com\r\nContent-Length: {len(body)}\r\n\r\n"
        self._client.send(head.encode() + body)
        status, _, answer = await self._client.response()
        return status, json.loads(answer) if answer else None

    async def load(self, name: str, url: Path | str) -> tuple[int, Any]:
        return await self.ask("POST", "/models", {"model_name": name, "url": str(url)})


@pytest.fixture
async def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SageMakerPort]:
    """With an empty repository; the platform's models are below ``tmp_path``."""
    models = tmp_path / "ml"
    (tmp_path / "repository").mkdir()
    monkeypatch.setattr("conch.library.app.SageMakerModels", lambda server: SageMakerModels(server, models))
    application = Application(
        Settings(
            model_repository=(str(tmp_path / "repository"),),
            model_control_mode="explicit",
            allow_sagemaker=True,
            sagemaker_port=0,
            allow_http=False,
            allow_grpc=False,
            allow_metrics=False,
        )
    )
    await application.listen()
    await application.load_models()
    reader, writer = await asyncio.open_connection("127.0.0.1", application.addresses["sagemaker"][1])
    yield SageMakerPort(application, Client(reader, writer), models)
    writer.close()
    await application.stop(0)


async def test_sagemaker_loads_lists_invokes_and_unloads_models(endpoint: SageMakerPort) -> None:
    packed = build(endpoint.models / "hash-1" / "model", "identity_fp32")
    url = endpoint.models / "hash-1" / "model"
    assert await endpoint.ask("POST", "/models/one/invoke", {}) == (
        404, {"error": "model 'one' is not loaded"},
    )  # fmt: skip
    (packed / "identity_fp32" / "config.pbtxt").write_text(
        (packed / "identity_fp32" / "config.pbtxt").read_text().replace('name: "identity_fp32"', "")
    )
    assert await endpoint.load("one", url) == (200, None)
    assert (await endpoint.load("one", url))[0] == 409
    shown = {"modelName": "one", "modelUrl": str(packed / "identity_fp32")}
    assert await endpoint.ask("GET", "/models") == (200, {"models": [shown]})
    assert await endpoint.ask("GET", "/models/one") == (200, shown)
    body = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [5]}]}
    status, answer = await endpoint.ask("POST", "/models/one/invoke", body)
    assert (status, answer["model_name"], answer["outputs"][0]["data"]) == (200, "one", [5.0])
    assert await endpoint.ask("DELETE", "/models/one") == (200, None)
    for method, path in (("DELETE", "/models/one"), ("GET", "/models/one")):
        assert await endpoint.ask(method, path) == (404, {"error": "model 'one' is not loaded"})
    assert await endpoint.ask("GET", "/models") == (200, {"models": []})


@pytest.mark.parametrize(
    "place", ["", "/etc", "{models}/../x/model", "{models}/h/other", "{models}", "{models}/a/b/model"]
)
async def test_sagemaker_loads_only_what_the_platform_has_put_there(endpoint: SageMakerPort, place: str) -> None:
    status, answer = await endpoint.load("one", place.format(models=endpoint.models))
    assert status == 400
    assert "is not a model of SageMaker's: expected" in answer["error"]
    assert await endpoint.ask("GET", "/models") == (200, {"models": []})


async def test_models_that_do_not_load_are_not_listed(endpoint: SageMakerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    url = endpoint.models / "h" / "model"
    assert await endpoint.load("one", url) == (400, {"error": f"failed to register '{url}', repository not found"})
    (url / "1").mkdir(parents=True)
    assert (await endpoint.load("one", url))[0] in (400, 500)

    async def full(name: str) -> None:
        raise unavailable("there is no memory left")

    monkeypatch.setattr(endpoint.application.server, "load", full)
    assert await endpoint.load("one", url) == (507, {"error": "there is no memory left"})
    assert await endpoint.ask("GET", "/models") == (200, {"models": []})


async def test_model_that_is_being_loaded_is_not_loaded_again(tmp_path: Path) -> None:
    """Both requests arrive before the folder of the first has been read."""
    path = tmp_path / "h" / "model"
    path.mkdir(parents=True)
    server: Any = Mock(repository=Mock(registered={}), load=AsyncMock())
    models = SageMakerModels(server, tmp_path)
    connections: list[Any] = [WrittenConnection(), WrittenConnection()]
    for connection in connections:
        exchange = HttpExchange(connection, b"POST", b"/models", {}, True)
        exchange.body = json.dumps({"model_name": "one", "url": str(path)}).encode()
        models.load(exchange)
    await until(lambda: all(connection.ended for connection in connections))
    assert sorted(connection.written.split()[1] for connection in connections) == [b"200", b"409"]
    assert server.load.await_count == 1 and server.repository.registered == {"one": path}


class Asked:
    """An exchange as far as a platform reads it."""

    def __init__(self, path: str) -> None:
        self.method, self.path = b"POST", path.encode()
        self.headers: dict[bytes, bytes] = {}


@pytest.mark.parametrize(
    ("mapped", "asked", "found"),
    [
        ("", "/predict", "/v2/models/a%20b/infer"),
        ("", "/predictWithResponseStream", "/v2/models/a%20b/generate_stream"),
        ("", "/health", "/v2/health/ready"),
        ("", "/v2/models/other/infer", "/v2/models/other/infer"),
        ("/predict", "/predict", "/v2/models/a%20b/infer"),
        ("/v2/models/m/generate", "/predict", "/v2/models/m/generate"),
        ("/v2/models/m/generate", "/predictWithResponseStream", "/v2/models/m/generate_stream"),
        ("/v1/completions", "/predictWithResponseStream", "/v1/completions"),
    ],
)
def test_oci_asks_at_its_own_paths_and_at_mapped_ones(mapped: str, asked: str, found: str) -> None:
    exchange = Asked(asked)
    platform = OciDataScience({"MODEL_DEPLOY_PREDICT_ENDPOINT": mapped}, lambda: "a b")
    assert platform.translate(exchange, None)  # type: ignore[arg-type]
    assert exchange.path.decode() == found


def test_oci_may_map_health_elsewhere() -> None:
    exchange = Asked("/health")
    OciDataScience({"MODEL_DEPLOY_HEALTH_ENDPOINT": "/v2/health/live"}, str).translate(exchange, None)  # type: ignore[arg-type]
    assert exchange.path == b"/v2/health/live"


def test_sagemaker_generates_where_its_environment_says_so() -> None:
    environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate"}
    exchange = Asked("/invocations")
    assert SageMaker(environment, ()).translate(exchange, None)  # type: ignore[arg-type]
    assert exchange.path == b"/v2/models/m/generate"
