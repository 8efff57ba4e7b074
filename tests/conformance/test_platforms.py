"""The ports for SageMaker and Vertex AI: documented requests get the same responses from conch and the real Triton."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from conch.machine.ports import is_free
from tests.conformance.raw import Reply, Request, send, tensor
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import build
from tests.oracle.run import free_ports

JSON_BODY = {"inputs": [tensor("INPUT", "FP32", [1, 2])]}
HEADER = json.dumps(
    {
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
        "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}],
    }
).encode()
DATA = struct.pack("<ff", 1, 2)
REDIRECT = "X-Vertex-Ai-Triton-Redirect"


@dataclass(frozen=True)
class Platforms:
    """A server, and the addresses of its ports for platforms."""

    server: Server
    sagemaker: str
    vertex: str


@pytest.fixture(scope="module")
def platforms(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platforms]:
    repository = build(tmp_path_factory.mktemp("platforms") / "models", "identity_fp32")
    sagemaker, vertex = free_ports(2)
    environment = {
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "identity_fp32",
        "AIP_PREDICT_ROUTE": "/predict",
        "AIP_HEALTH_ROUTE": "/health",
    }
    flags = (
        "--allow-sagemaker=true", f"--sagemaker-port={sagemaker}",
        "--allow-vertex-ai=true", f"--vertex-ai-port={vertex}",
    )  # fmt: skip
    with start(repository, *flags, env=environment) as server:
        # Triton opens them one after the other.
        eventually(lambda: not is_free("127.0.0.1", sagemaker) and not is_free("127.0.0.1", vertex), "the ports")
        yield Platforms(server, f"127.0.0.1:{sagemaker}", f"127.0.0.1:{vertex}")


def output(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return reply.json()["outputs"][0]["data"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/ping", 200), ("POST", "/ping", 405), ("GET", "/invocations", 405), ("GET", "/v2/health/ready", 400)],
)
def test_sagemaker_pings(platforms: Platforms, method: str, path: str, status: int) -> None:
    assert send(platforms.sagemaker, Request(method, path)).status == status


def test_sagemaker_invokes_the_default_model(platforms: Platforms) -> None:
    assert output(send(platforms.sagemaker, Request("POST", "/invocations", JSON_BODY))) == [1.0, 2.0]


def test_sagemaker_takes_and_gets_binary_tensors(platforms: Platforms) -> None:
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    headers = {"Content-Type": f"{kind}{len(HEADER)}", "Inference-Header-Content-Length": "3"}
    reply = send(platforms.sagemaker, Request("POST", "/invocations", HEADER + DATA, headers))
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith(kind)
    assert "inference-header-content-length" not in reply.headers
    size = int(reply.headers["content-type"].removeprefix(kind))
    assert json.loads(reply.body[:size])["model_name"] == "identity_fp32"
    assert reply.body[size:] == DATA


def test_sagemaker_lists_no_models_of_its_own(platforms: Platforms) -> None:
    for path in ("/models", "/models/"):
        assert send(platforms.sagemaker, Request("GET", path)).json() == {"models": []}
    assert send(platforms.sagemaker, Request("GET", "/models/identity_fp32")).status == 404
    assert send(platforms.sagemaker, Request("POST", "/models/identity_fp32/invoke", JSON_BODY)).status == 404


def test_vertex_ai_predicts(platforms: Platforms) -> None:
    assert send(platforms.vertex, Request("GET", "/health")).status == 200
    assert output(send(platforms.vertex, Request("POST", "/predict", JSON_BODY))) == [1.0, 2.0]
    kind = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
    request = Request("POST", "/predict", HEADER + DATA, {"Content-Type": f"{kind}{len(HEADER)}"})
    reply = send(platforms.vertex, request)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.body[int(reply.headers["inference-header-content-length"]) :] == DATA


@pytest.mark.parametrize(
    "asked",
    [
        "v2", "v2/health/ready", "v2/models/identity_fp32", "v2/models/identity_fp32/config",
        "v2/models/identity_fp32/ready", "v2/repository/index", "v2/systemsharedmemory/status",
    ],
)  # fmt: skip
def test_vertex_ai_redirects(platforms: Platforms, asked: str) -> None:
    redirected = send(platforms.vertex, Request("POST", "/predict", None, {REDIRECT: asked}))
    method = "POST" if asked == "v2/repository/index" else "GET"
    direct = send(platforms.server.http, Request(method, f"/{asked}"))
    assert (redirected.status, redirected.body) == (direct.status, direct.body)


def test_vertex_ai_redirects_inference(platforms: Platforms) -> None:
    headers = {REDIRECT: "v2/models/identity_fp32/versions/1/infer"}
    assert output(send(platforms.vertex, Request("POST", "/predict", JSON_BODY, headers))) == [1.0, 2.0]


@pytest.mark.parametrize("asked", ["", "/v2", "v2/nothing"])
def test_vertex_ai_redirects_to_nothing_else(platforms: Platforms, asked: str) -> None:
    assert send(platforms.vertex, Request("POST", "/predict", None, {REDIRECT: asked})).status == 400


@pytest.mark.parametrize(("method", "path"), [("POST", "/health"), ("GET", "/predict")])
def test_vertex_ai_refuses_other_methods(platforms: Platforms, method: str, path: str) -> None:
    assert send(platforms.vertex, Request(method, path)).status == 405
