"""A server with API keys: who may do what, with the clients of OpenAI and of gRPC."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import openai
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.models import build
from tests.servers import ConchServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ConchServer]:
    repository = build(folder / "models", "talker", group="openai")
    (folder / "keys").write_text("ada=key-of-ada\nbob=key-of-bob\n")
    flags = [f"--api-key-file={folder / 'keys'}", "--log-verbose=1", "--cors-origins=https://chat.example"]
    environment = {"EVENTS": str(folder), "CONCH_API_KEY": "another"}
    with ConchServer(repository, *flags, log=folder / "log", env=environment) as server:
        yield server


def connect(server: ConchServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0, timeout=60)


def status(server: ConchServer, method: str, path: str, **headers: str) -> int:
    return send(server, method, path, **headers)[0]


def send(server: ConchServer, method: str, path: str, **headers: str) -> tuple[int, Message]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status, reply.headers


def test_clients_need_a_key_and_are_named_in_the_access_log(server: ConchServer, folder: Path) -> None:
    for key in ("key-of-ada", "another"):
        with connect(server, key) as client:
            assert client.completions.create(model="talker", prompt="a b").choices[0].text == "a b"
    with connect(server, "guess") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")
    log = (folder / "log").read_text()
    assert "HTTP POST /v1/completions of ada: 200" in log
    assert "HTTP POST /v1/completions of default: 200" in log
    assert "key-of-ada" not in log


def test_only_health_checks_need_no_key(server: ConchServer) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/health/ready", "/ping"):
        assert status(server, "GET", path) == 200
    for method, path in (("GET", "/v2"), ("GET", "/version"), ("POST", "/v2/repository/index"), ("GET", "/v2/logging")):
        assert status(server, method, path) == 401
        assert status(server, method, path, x_api_key="key-of-bob") == 200


def test_stored_responses_belong_to_the_name_of_the_key(server: ConchServer) -> None:
    with connect(server, "key-of-ada") as ada, connect(server, "key-of-bob") as bob:
        response = ada.responses.create(model="talker", input="one")
        for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(response.id)
        for id in (response.id, f"ada/{response.id}"):
            with pytest.raises(openai.BadRequestError, match="not found"):
                bob.responses.create(model="talker", input="two", previous_response_id=id)
        assert ada.responses.retrieve(response.id).output_text == "one"
        assert ada.responses.create(model="talker", input="two", previous_response_id=response.id).output_text == "two"
        ada.responses.delete(response.id)


def test_calls_of_grpc_need_a_key(server: ConchServer, folder: Path) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live()
        with pytest.raises(InferenceServerException) as caught:
            client.get_server_metadata()
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        assert client.get_server_metadata(headers={"authorization": "Bearer key-of-bob"}).name == "triton"
    assert "ServerMetadata of bob:" in (folder / "log").read_text()


def test_pages_of_an_allowed_origin_ask_before_they_send_a_key(server: ConchServer) -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
    status, headers = send(server, "OPTIONS", "/v1/chat/completions", origin="https://chat.example", **asked)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, "https://chat.example")
    assert headers["Access-Control-Allow-Methods"] == "POST"
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    # The page can read why it is refused.
    status, headers = send(server, "GET", "/v1/models", origin="https://chat.example")
    assert (status, headers["Access-Control-Allow-Origin"]) == (401, "https://chat.example")
    for origin in ("https://evil.example", "http://chat.example"):
        status, headers = send(server, "OPTIONS", "/v1/chat/completions", origin=origin, **asked)
        assert (status, headers["Access-Control-Allow-Origin"]) == (405, None)


def test_processes_of_models_do_not_have_the_key_of_the_environment(server: ConchServer) -> None:
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    workers = [child for child in children if any(part.endswith("worker.py") for part in child.cmdline())]
    assert workers
    assert not [worker.cmdline() for worker in workers if "CONCH_API_KEY" in worker.environ()]
