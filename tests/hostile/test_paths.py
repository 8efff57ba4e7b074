"""Names with paths out of the repository: nothing outside it is loaded, written or read.

``outside`` is a model next to the repository that creates a file when it is loaded, ``secret.txt`` a file there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.conformance.raw import Reply, get, post
from tests.conftest import Server, Start
from tests.hostile.raw_http import exchange
from tests.models import build, write

#: As long as the warm-up data that it would be read as.
_SECRET: Final = "sixteen letters."
_MARKING: Final = "from pathlib import Path\nPath({marker!r}).touch()\nfrom conch.nothing import TritonPythonModel\n"
_CONFIG: Final[dict[str, Any]] = {
    "backend": "python",
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
}


class Place(NamedTuple):
    server: Server
    folder: Path

    def untouched(self) -> bool:
        """Return whether nothing was run or written, and the server still runs."""
        found = {path.name for path in self.folder.iterdir()}
        return found == {"models", "outside", "secret.txt", "log"} and (
            get(self.server.http, "/v2/models/add_sub").status == 200
        )

    def load(self, parameters: dict[str, Any]) -> Reply:
        return post(self.server.http, "/v2/repository/models/add_sub/load", {"parameters": parameters})


@pytest.fixture(scope="module")
def place(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder: Path = tmp_path_factory.mktemp("paths")
    repository = build(folder / "models", "add_sub")
    for inside in (repository / "add_sub", repository / "add_sub" / "warmup"):
        inside.mkdir(exist_ok=True)
        (inside / "link").symlink_to(folder / "secret.txt")
    write(folder, "outside", json.dumps(_CONFIG), {"1/model.py": _MARKING.format(marker=str(folder / "marker"))})
    (folder / "secret.txt").write_text(_SECRET)
    flags = ("--model-control-mode=explicit", "--load-model=add_sub")
    with start(repository, *flags, log=folder / "log") as server:
        yield Place(server, folder)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", "..%2foutside", "..%2Foutside", "%2e%2e/outside", "%2e%2e%2foutside", "..%252foutside",
        "%252e%252e%252foutside", "..%5coutside", "..\\outside", "add_sub/../../outside", "add_sub%2f..%2f..%2foutside",
        "/outside", "%2foutside", ".", "..", "%2e%2e", "outside%00", "%c0%ae%c0%ae%2foutside", "%ef%bc%8e.%2foutside",
        "a" * 5000, "%", "%zz",
    ],
)  # fmt: skip
def test_name_of_a_model_leads_nowhere(place: Place, name: str) -> None:
    for line in (f"GET /v2/models/{name}", f"POST /v2/repository/models/{name}/load", f"POST /v2/models/{name}/infer"):
        head = f"{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        outcome = exchange(place.server.http, head.encode(), 10)
        assert outcome.statuses in ((400,), (404,), (405,), (500,)), outcome
    assert place.untouched()


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "..", "add_sub/../../outside", "..\\outside", "..%2foutside"]
)
def test_name_of_a_model_leads_nowhere_in_grpc(place: Place, name: str) -> None:
    with grpcclient.InferenceServerClient(place.server.grpc) as client:
        for call in (client.load_model, client.get_model_metadata, client.get_model_config):
            with pytest.raises(InferenceServerException):
                call(name)
    assert place.untouched()


@pytest.mark.parametrize(
    "version",
    ["../1", "..%2f1", "1%2f..%2f1", "+1", "-1", "1%00", "1%20", "0x1", "1_0", "%d9%a1", "9" * 23, "1.0", "1e0"],
)
def test_version_is_a_number_in_digits(place: Place, version: str) -> None:
    head = f"GET /v2/models/add_sub/versions/{version} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert exchange(place.server.http, head.encode(), 10).statuses in ((400,), (404,))


#: The real Triton does not respond to the others, nor to any load after them.
_BOTH: Final = ("../escape", "../../escape", "1/../../escape", "/../escape")


@pytest.mark.parametrize(
    "path",
    [*_BOTH, "1/..\\..\\escape", "1/\0escape", "..", "", "1/model.py/../../../escape", "./1/../../escape", "{}/escape"],
)
def test_uploaded_file_stays_in_the_model(place: Place, server_kind: str, path: str) -> None:
    if server_kind == "triton" and path not in _BOTH:
        pytest.skip("2.51 never answers")
    parameters = {"config": json.dumps(_CONFIG), f"file:{path.format(place.folder)}": base64.b64encode(b"x").decode()}
    assert place.load(parameters).status in (400, 500)
    assert place.untouched()


@pytest.mark.parametrize("file", ["../../secret.txt", "{}/secret.txt", "link", "../link"])
@pytest.mark.parametrize("use", ["labels", "warm-up"])
def test_file_that_a_configuration_names_lies_in_the_model(place: Place, server_kind: str, use: str, file: str) -> None:
    if server_kind == "triton":
        pytest.skip("2.51 reads them")
    file = file.format(place.folder)
    config = json.loads(json.dumps(_CONFIG))
    if use == "labels":
        config["output"][0]["label_filename"] = file
    else:
        data = {"data_type": "TYPE_FP32", "dims": [4], "input_data_file": file}
        config["model_warmup"] = [{"name": "w", "batch_size": 1, "inputs": {"INPUT0": data}}]
    reply = place.load({"config": json.dumps(config)})
    assert reply.status == 400
    assert "must be inside" in reply.error
    assert place.untouched()
