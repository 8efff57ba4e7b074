"""Loading, unloading and reloading on request (explicit mode), and by polling."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import Client, floats, ints, strings
from tests.conformance.conftest import pass_gate
from tests.conformance.raw import Reply, get, post, tensor
from tests.conftest import Server, Start
from tests.events import Events, eventually
from tests.models import build, write

CONFIG = """
backend: "python"
input { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        output = pb_utils.Tensor("OUTPUT", np.array([{value}], np.int32))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""
BROKEN_MODEL = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("told to fail")
"""


@pytest.fixture(scope="module")
def explicit_repository(tmp_path_factory: pytest.TempPathFactory, server_kind: str) -> Path:
    repository = tmp_path_factory.mktemp(f"explicit_{server_kind}") / "models"
    return build(repository, "gate", "plus_one", "chain", "sum", "diamond", "version_some", "identity_string")


@pytest.fixture(scope="module")
def explicit(explicit_repository: Path, start: Start, logs: Path, server_kind: str) -> Iterator[Server]:
    """A server in explicit mode that has loaded one model at startup."""
    flags = ("--model-control-mode=explicit", "--load-model=identity_string")
    with start(explicit_repository, *flags, log=logs / f"explicit_{server_kind}.log") as server:
        yield server


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, explicit: Server) -> Client:
    return Client(request.param, explicit)


Put = Callable[..., None]


@pytest.fixture
def put(explicit_repository: Path) -> Put:
    """Write (or overwrite) a model that returns a number."""
    clock = iter(range(int(time.time()) + 10, 2**40, 10))

    def put(name: str, value: int | None, version: int = 1, config: str | None = CONFIG) -> None:
        text = BROKEN_MODEL if value is None else MODEL.format(value=value)
        model = write(explicit_repository, name, config, {f"{version}/model.py": text})
        moment = next(clock)
        os.utime(model / str(version) / "model.py", (moment, moment))

    return put


def answer(client: Client, name: str, version: str = "") -> int:
    return int(client.infer(name, {"INPUT": ints(0)}, model_version=version)["OUTPUT"][0])


def index(server: Server, ready: bool = False) -> dict[tuple[str, str], tuple[str, str]]:
    entries = post(server.http, "/v2/repository/index", {"ready": ready}).json()
    return {(e["name"], e.get("version", "")): (e.get("state", ""), e.get("reason", "")) for e in entries}


def test_only_models_named_are_loaded_at_startup(explicit: Server) -> None:
    entries = index(explicit)
    assert entries["identity_string", "1"] == ("READY", "")
    assert entries["plus_one", ""] == ("", "")
    assert ("plus_one", "") not in index(explicit, ready=True)


def test_model_is_unknown_until_loaded_and_after_unloading(client: Client, put: Put) -> None:
    name = f"late_{client.protocol}"
    put(name, 5)
    with client.refused("NOT_FOUND", f"Request for unknown model: '{name}' is not found"):
        answer(client, name)
    client.api.load_model(name)
    assert client.api.is_model_ready(name)
    assert answer(client, name) == 5
    client.api.unload_model(name)
    eventually(lambda: not client.api.is_model_ready(name), "unloading")
    with client.refused("NOT_FOUND", f"Request for unknown model: '{name}' has no available versions"):
        answer(client, name)
    with client.refused("UNAVAILABLE", f"Request for unknown model: '{name}' version 1 is not at ready state"):
        answer(client, name, "1")
    client.api.load_model(name)
    assert answer(client, name) == 5


def test_unloaded_model_stays_in_the_index_with_its_reason(explicit: Server, put: Put) -> None:
    put("indexed", 1)
    post(explicit.http, "/v2/repository/models/indexed/load")
    assert index(explicit)["indexed", "1"] == ("READY", "")
    post(explicit.http, "/v2/repository/models/indexed/unload")
    eventually(lambda: index(explicit)["indexed", "1"] == ("UNAVAILABLE", "unloaded"), "unloading")


def test_reload_swaps_the_model(client: Client, put: Put) -> None:
    name = f"swapped_{client.protocol}"
    put(name, 1)
    client.api.load_model(name)
    put(name, 2)
    client.api.load_model(name)
    assert answer(client, name) == 2


def test_failed_reload_keeps_the_old_model(client: Client, put: Put, explicit_repository: Path) -> None:
    name = f"kept_{client.protocol}"
    put(name, 1)
    client.api.load_model(name)
    put(name, None)
    place = f"\n\nAt:\n  {explicit_repository}/{name}/1/model.py(4): initialize\n"
    reason = f"version 1 is at UNAVAILABLE state: Internal: ValueError: told to fail{place};\n"
    with client.refused("INVALID_ARG", f"load failed for model '{name}': {reason}"):
        client.api.load_model(name)
    assert client.api.is_model_ready(name)
    assert answer(client, name) == 1
    put(name, 3)
    client.api.load_model(name)
    assert answer(client, name) == 3


def test_failed_load_is_in_the_index(explicit: Server, put: Put, explicit_repository: Path) -> None:
    put("fails", None)
    assert post(explicit.http, "/v2/repository/models/fails/load").status == 400
    state, reason = index(explicit)["fails", "1"]
    assert state == "UNAVAILABLE"
    assert reason.startswith("Internal: ValueError: told to fail\n\nAt:\n")
    post(explicit.http, "/v2/repository/models/fails/unload")


def test_new_version_replaces_the_old_one(client: Client, put: Put) -> None:
    name = f"versioned_{client.protocol}"
    put(name, 1)
    client.api.load_model(name)
    put(name, 2, version=2)
    client.api.load_model(name)
    assert client.get("model_metadata", name)["versions"] == ["2"]
    assert answer(client, name) == 2


def test_load_of_a_missing_model_is_refused(client: Client) -> None:
    with client.refused("INTERNAL", "failed to load 'absent', failed to poll from model repository"):
        client.api.load_model("absent")


def test_unload_of_an_unknown_model_is_no_error(client: Client) -> None:
    client.api.unload_model("absent")
    assert not client.api.is_model_ready("absent")


def test_config_override_is_gone_when_the_changed_model_is_loaded(client: Client, put: Put) -> None:
    name = f"overridden_{client.protocol}"
    put(name, 1)
    client.api.load_model(name)
    config = {
        "backend": "python",
        "max_batch_size": 0,
        "input": [{"name": "INPUT", "data_type": "TYPE_INT32", "dims": [-1]}],
        "output": [{"name": "OUTPUT", "data_type": "TYPE_INT32", "dims": [1]}],
        "parameters": {"who": {"string_value": "override"}},
    }
    client.api.load_model(name, config=json.dumps(config))
    seen = client.get("model_config", name)
    seen = seen.get("config", seen)
    assert seen["parameters"] == {"who": {"string_value": "override"}}
    # Triton 2.51 keeps the override if no file has changed since; conch uses the file again in both cases.
    put(name, 1)
    client.api.load_model(name)
    seen = client.get("model_config", name)
    assert not seen.get("config", seen).get("parameters")


@pytest.mark.parametrize("config", ["no json", '{"backend": "python", "nonsense": 1}'])
def test_bad_config_override_is_refused_and_changes_nothing(client: Client, put: Put, config: str) -> None:
    name = f"unchanged_{client.protocol}"
    put(name, 1)
    client.api.load_model(name)
    with client.refused("INTERNAL", f"failed to load '{name}', failed to poll from model repository"):
        client.api.load_model(name, config=config)
    assert answer(client, name) == 1


def test_file_override_replaces_the_directory_for_one_load(client: Client, put: Put) -> None:
    name = f"uploaded_{client.protocol}"
    put(name, 1)
    client.api.load_model(name)
    files = {"file:3/model.py": MODEL.format(value=30).encode()}
    config = json.dumps({"backend": "python", "input": [{"name": "INPUT", "data_type": "TYPE_INT32", "dims": [1]}],
                         "output": [{"name": "OUTPUT", "data_type": "TYPE_INT32", "dims": [1]}]})  # fmt: skip
    client.api.load_model(name, config=config, files=files)
    assert client.get("model_metadata", name)["versions"] == ["3"]
    assert answer(client, name) == 30
    client.api.load_model(name)
    assert client.get("model_metadata", name)["versions"] == ["1"]
    assert answer(client, name) == 1


def load(server: Server, name: str, parameters: dict[str, Any] | None = None) -> Reply:
    return post(server.http, f"/v2/repository/models/{name}/load", {"parameters": parameters} if parameters else None)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        ({"file:1/model.py": "eA=="}, 400),
        ({"file:1/model.py": "eA==", "config": "{}"}, 400),
        ({"file:../../escape.py": "eA==", "config": "{}"}, 400),
        ({"file:" + "n" * 300: "eA==", "config": "{}"}, 500),
    ],
    ids=["without config", "not a model", "outside", "name too long"],
)
def test_wrong_file_override_is_refused(
    explicit: Server, put: Put, parameters: dict[str, str], status: int, server_kind: str
) -> None:
    if server_kind == "triton" and any(len(key) > 255 for key in parameters):
        pytest.skip("2.51 dies of a file name that is too long")
    put("uploaded_wrongly", 7)
    assert load(explicit, "uploaded_wrongly").status == 200
    reply = load(explicit, "uploaded_wrongly", parameters)
    assert reply.status in (status, 500), reply.body
    assert reply.error
    assert answer(Client("http", explicit), "uploaded_wrongly") == 7


def test_ensemble_loads_its_members(explicit: Server) -> None:
    client = Client("http", explicit)
    client.api.load_model("chain")
    assert client.api.is_model_ready("plus_one")
    assert client.infer("chain", {"X": floats(1).reshape(1, 1)})["Y"].tolist() == [[3]]
    client.api.unload_model("chain")
    eventually(lambda: not client.api.is_model_ready("chain"), "unloading the ensemble")
    assert client.api.is_model_ready("plus_one")
    client.api.unload_model("plus_one")


def test_member_keeps_the_configuration_that_it_was_loaded_with_when_its_ensemble_is_loaded(
    explicit: Server, put: Put, explicit_repository: Path
) -> None:
    client = Client("http", explicit)
    tensor = {"data_type": "TYPE_INT32", "dims": [1]}
    config = {
        "backend": "python",
        "input": [{"name": "INPUT", **tensor}],
        "output": [{"name": "OUTPUT", **tensor}],
        "parameters": {"who": {"string_value": "override"}},
    }
    step = (
        'ensemble_scheduling { step { model_name: "tuned" model_version: -1 '
        'input_map { key: "INPUT" value: "INPUT" } output_map { key: "OUTPUT" value: "OUTPUT" } } }'
    )
    put("tuned", 5)
    text = CONFIG.replace('backend: "python"', 'platform: "ensemble"') + step
    write(explicit_repository, "around", text, {"1/x": ""})
    assert load(explicit, "tuned", {"config": json.dumps(config)}).status == 200

    reply = load(explicit, "around")

    assert reply.status == 200, reply.body
    assert client.get("model_config", "tuned")["parameters"] == {"who": {"string_value": "override"}}
    assert answer(client, "around") == 5
    put("tuned", 6)
    assert load(explicit, "around").status == 200
    assert not client.get("model_config", "tuned").get("parameters")
    assert answer(client, "around") == 6


def test_unload_dependents_unloads_the_members(explicit: Server) -> None:
    client = Client("http", explicit)
    client.api.load_model("diamond")
    client.api.unload_model("diamond", unload_dependents=True)
    eventually(
        lambda: not any(client.api.is_model_ready(name) for name in ("diamond", "sum", "plus_one")), "unloading all"
    )


def test_ensemble_is_unavailable_while_a_member_is_unloaded(explicit: Server) -> None:
    client = Client("http", explicit)
    client.api.load_model("chain")
    client.api.unload_model("plus_one")
    eventually(lambda: not client.api.is_model_ready("chain"), "the ensemble being unavailable")
    client.api.load_model("plus_one")
    assert client.api.is_model_ready("chain")
    client.api.unload_model("chain")


def test_request_in_flight_survives_unloading(
    explicit: Server, events: Events, background: Callable[..., Future[Any]]
) -> None:
    load(explicit, "gate")
    running = background(pass_gate, explicit, events, "running")
    events.wait("running.started")
    post(explicit.http, "/v2/repository/models/gate/unload")
    eventually(lambda: pass_gate(explicit, events, "late").status in (404, 503), "refusing new requests")
    events.set("running.go")
    reply = running.result()
    assert (reply.status, reply.json()["outputs"][0]["data"]) == (200, ["running"])
    eventually(lambda: index(explicit)["gate", "1"] == ("UNAVAILABLE", "unloaded"), "unloading")


def test_request_in_flight_survives_a_reload(
    explicit: Server, explicit_repository: Path, events: Events, background: Callable[..., Future[Any]]
) -> None:
    load(explicit, "gate")
    running = background(pass_gate, explicit, events, "running")
    events.wait("running.started")
    os.utime(explicit_repository / "gate" / "1" / "model.py", (2**31, 2**31))
    assert load(explicit, "gate").status == 200
    events.set("new.go")
    assert pass_gate(explicit, events, "new").status == 200
    assert not running.done()
    events.set("running.go")
    assert running.result().status == 200
    post(explicit.http, "/v2/repository/models/gate/unload")


def test_server_is_ready_when_nothing_is_loaded(explicit: Server) -> None:
    assert get(explicit.http, "/v2/health/live").status == 200


class TestPolling:
    @pytest.fixture
    def polled(self, tmp_path: Path, start: Start, logs: Path, server_kind: str) -> Iterator[tuple[Path, Server]]:
        repository = tmp_path / "models"
        write(repository, "constant", CONFIG, {"1/model.py": MODEL.format(value=1)})
        flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
        with start(repository, *flags, log=logs / f"poll_{server_kind}.log") as server:
            yield repository, server

    def test_changes_are_found(self, polled: tuple[Path, Server]) -> None:
        repository, server = polled
        client = Client("http", server)
        assert answer(client, "constant") == 1

        reply = load(server, "constant")
        assert (reply.status, reply.error) == (
            503, "explicit model load / unload is not allowed if polling is enabled",
        )  # fmt: skip

        write(repository, "added", CONFIG, {"1/model.py": MODEL.format(value=9)})
        (repository / "constant" / "1" / "model.py").write_text(MODEL.format(value=2))
        eventually(lambda: client.api.is_model_ready("added"), "loading the new model")
        assert answer(client, "added") == 9
        eventually(lambda: answer(client, "constant") == 2, "reloading the changed model")

        write(repository, "constant", None, {"1/model.py": BROKEN_MODEL})
        for path in sorted((repository / "added").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (repository / "added").rmdir()
        eventually(lambda: not client.api.is_model_ready("added"), "unloading the removed model")
        assert answer(client, "constant") == 2


def test_strings_of_a_model_loaded_at_startup(explicit: Server) -> None:
    reply = post(
        explicit.http, "/v2/models/identity_string/infer", {"inputs": [tensor("TEXT", "BYTES", ["a"], [1, 1])]}
    )
    assert reply.json()["outputs"][0]["data"] == ["a"]
    assert Client("grpc", explicit).infer("identity_string", {"TEXT": strings("a").reshape(1, 1)})["OUTPUT"] == b"a"
