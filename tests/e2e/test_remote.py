"""A model of a server in front whose own server comes, goes and comes back; it has no directory anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.raw import Reply, get, post, tensor
from tests.events import eventually
from tests.models import build
from tests.servers import ConchServer

pytestmark = pytest.mark.timeout(120)


def config(url: str, **more: object) -> dict[str, Any]:
    """The parameters of a load of a model that ``identity_string`` behind ``url`` answers for."""
    parameters = {"url": url, "model": "identity_string", **more}
    document = {
        "backend": "remote",
        "max_batch_size": 8,
        "input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "OUTPUT", "data_type": "TYPE_STRING", "dims": [1]}],
        "parameters": {name: {"string_value": str(value)} for name, value in parameters.items()},
    }
    return {"parameters": {"config": json.dumps(document)}}


def ask(front: ConchServer, name: str) -> Reply:
    body = {"inputs": [tensor("TEXT", "BYTES", ["so"], [1, 1])]}
    return post(front.http, f"/v2/models/{name}/infer", body)


def state(front: ConchServer, name: str) -> tuple[str, str]:
    """State and reason in the repository index."""
    entries = {entry["name"]: entry for entry in post(front.http, "/v2/repository/index", {}).json()}
    return entries[name]["state"], entries[name].get("reason", "")


def is_ready(front: ConchServer, name: str) -> bool:
    return get(front.http, f"/v2/models/{name}/ready").status == 200


def test_a_remote_model_follows_its_server(tmp_path: Path) -> None:
    build(tmp_path / "back", "identity_string")
    (tmp_path / "front").mkdir()
    back = ConchServer(tmp_path / "back")
    urls = {"over_http": f"http://{back.http}", "over_grpc": f"grpc://{back.grpc}"}
    with ConchServer(tmp_path / "front", "--model-control-mode=explicit", log=tmp_path / "front.log") as front:
        for name, url in urls.items():
            assert post(front.http, f"/v2/repository/models/{name}/load", config(url)).status == 200
            reason = f"{url}: no connection: Connection refused"
            assert (is_ready(front, name), state(front, name)) == (False, ("UNAVAILABLE", reason))
            refused = ask(front, name)
            assert (refused.status, refused.error) == (503, f"model '{name}' is not available: {reason}")
        with back:
            for name in urls:
                eventually(lambda name=name: is_ready(front, name), f"readiness of {name}")
                assert state(front, name) == ("READY", "")
                assert ask(front, name).json()["outputs"][0]["data"] == ["so"]
            assert back.process is not None
            back.process.kill()
            for name in urls:
                eventually(lambda name=name: not is_ready(front, name), f"the loss of {name}")
                assert ask(front, name).status == 503
        with back:
            for name in urls:
                eventually(lambda name=name: ask(front, name).status == 200, f"the return of {name}")
        for name in urls:
            assert post(front.http, f"/v2/repository/models/{name}/unload", {}).status == 200
            eventually(lambda name=name: state(front, name) == ("UNAVAILABLE", "unloaded"), f"the end of {name}")


def test_a_configuration_that_is_written_out_starts_without_its_server(tmp_path: Path) -> None:
    document = json.loads(config("grpc://127.0.0.1:1")["parameters"]["config"])
    (tmp_path / "models" / "alone").mkdir(parents=True)
    text = "\n".join(
        [
            'backend: "remote" max_batch_size: 8',
            'input { name: "TEXT" data_type: TYPE_STRING dims: 1 }',
            'output { name: "OUTPUT" data_type: TYPE_STRING dims: 1 }',
            *(
                f'parameters {{ key: "{name}" value {{ string_value: "{value["string_value"]}" }} }}'
                for name, value in document["parameters"].items()
            ),
        ]
    )
    (tmp_path / "models" / "alone" / "config.pbtxt").write_text(text)
    with ConchServer(tmp_path / "models", "--strict-readiness=false") as front:
        assert not is_ready(front, "alone")
        assert ask(front, "alone").status == 503
