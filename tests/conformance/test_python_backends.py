"""Python-based backends: a model.py in the backend directory runs every model that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.raw import get, post, tensor
from tests.conftest import Server, Start
from tests.models import write
from tests.oracle import OracleUnavailable, install

#: Returns the arguments that its model, its class and its module received.
SOURCE = """
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils

import beside


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.seen = {
            "arguments": {name: value for name, value in args.items() if name != "model_config"},
            "backend": config["backend"],
            "runtime": config["runtime"],
            "module": __name__,
            "file": os.path.basename(__file__),
            "beside": beside.NAME,
            "data": open(os.path.join(pb_utils.get_model_dir(), "data.txt")).read(),
        }
        self.asks = config["parameters"].get("ASKS", {}).get("string_value", "")

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if self.asks:
                inner = pb_utils.InferenceRequest(
                    model_name=self.asks, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", rows)]
                )
                rows = pb_utils.get_output_tensor_by_name(inner.exec(), "OUT").as_numpy()
            else:
                rows = np.array([[json.dumps(self.seen)] for _ in rows], object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", rows)]))
        return responses
"""
FAILING = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("no " + args["model_name"])
"""


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory, server_kind: str) -> Path:
    folder = tmp_path_factory.mktemp(f"backends_{server_kind}")
    for path, text in {
        "mine/model.py": SOURCE,
        "mine/beside.py": 'NAME = "beside the backend"',
        "failing/model.py": FAILING,
        "classless/model.py": "",
        "packed/model.py": FAILING,
        "packed/pb_exec_env_model.py.tar.gz": "no archive",
        "empty/readme": "",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if server_kind == "triton":
        try:
            (folder / "python").symlink_to(install().backends / "python")
        except OracleUnavailable as error:
            pytest.skip(f"the real Triton is not available here: {error}")
    return folder


DATA = {"1/data.txt": "one", "1/beside.py": 'NAME = "beside the data"', "beside.py": 'NAME = "in the model"'}
#: Valid and invalid configurations, by model name.
LOADING = {
    "plain": 'backend: "mine"',
    "second": 'backend: "mine" parameters { key: "ASKS" value { string_value: "plain" } }',
    "explicit": 'backend: "mine" runtime: "model.py" instance_group { count: 2 }',
    "named.mine": None,
    "...": 'backend: "mine"',
}
FAULTY = {
    "fails": 'backend: "failing"',
    "lacks_class": 'backend: "classless"',
    "is_packed": 'backend: "packed"',
    "unknown": 'backend: "nowhere"',
    "bare": 'backend: "empty"',
    "above": 'backend: ".."',
    "here": 'backend: "."',
    "unknown_based": 'backend: "nowhere" runtime: "model.py"',
    "python_based": 'backend: "python" runtime: "model.py"',
    "no_library": 'backend: "mine" runtime: "libtriton_mine.so"',
    "other_source": 'backend: "mine" runtime: "other.py"',
    "far_library": 'backend: "mine" runtime: "../../far.so"',
    "escaping": 'backend: "mine" runtime: "../beside.py"',
    "no_backend": 'backend: "identities"',
}


@pytest.fixture(scope="module")
def based_repository(tmp_path_factory: pytest.TempPathFactory, server_kind: str) -> Path:
    folder = tmp_path_factory.mktemp(f"based_{server_kind}")
    for name, config in (LOADING | FAULTY).items():
        write(folder, name, config, DATA)
    write(folder, "plain", None, {"2/data.txt": "two"})
    return folder


@pytest.fixture(scope="module")
def based(start: Start, backends: Path, based_repository: Path, logs: Path, server_kind: str) -> Iterator[Server]:
    flags = ("--model-control-mode=explicit", f"--backend-directory={backends}")
    with start(based_repository, *flags, log=logs / f"based_{server_kind}.log") as server:
        yield server


def load(server: Server, model: str) -> tuple[int, str]:
    reply = post(server.http, f"/v2/repository/models/{model}/load")
    return reply.status, reply.error if reply.status != 200 else ""


def ask(server: Server, model: str) -> dict[str, Any]:
    request = {"inputs": [tensor("IN", "BYTES", ["x"], [1, 1])]}
    reply = post(server.http, f"/v2/models/{model}/infer", request)
    assert reply.status == 200, reply.body
    seen: dict[str, Any] = json.loads(reply.json()["outputs"][0]["data"][0])
    return seen


@pytest.mark.parametrize("name", LOADING)
def test_model_is_run_by_the_source_of_its_backend(name: str, based: Server, based_repository: Path) -> None:
    if name == "second":
        load(based, "plain")
    assert load(based, name) == (200, "")
    asked = "plain" if name == "second" else name  # which it calls in turn
    seen = ask(based, name)
    instance = re.sub(r"_\d$", "_0", seen["arguments"].pop("model_instance_name"))
    version = "2" if asked == "plain" else "1"
    assert instance == f"{asked}_0_0" if asked == "explicit" else f"{asked}_0"
    assert seen == {
        "arguments": {
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
            "model_repository": str(based_repository / asked),
            "model_version": version,
            "model_name": asked,
        },
        "backend": "mine",
        "runtime": "model.py",
        "module": "model",
        "file": "model.py",
        "beside": "beside the backend",
        "data": "two" if asked == "plain" else "one",
    }
    config = get(based.http, f"/v2/models/{name}/config").json()
    assert (config["max_batch_size"], config["runtime"]) == (4, "model.py")
    assert config["dynamic_batching"]["preferred_batch_size"] == [4]


NO_LIBRARY = "unable to find backend library for backend '{}', try specifying runtime on the model configuration."
NOT_FOUND = "unable to find backend library '{}' for model '{}', searched: {}"
NOT_BASED = "unable to find Python backend based backend library 'model.py' for model '{}', searched: '{}/model.py'"
ESCAPES = "backend library name '{}' escapes backend directory '{}', for model '{}', check model config runtime field"


def expected(name: str, backends: Path, repository: Path) -> str:
    """Return Triton's reason why a model does not load."""
    if name == "fails":
        return f"Internal: ValueError: no fails\n\nAt:\n  {backends}/failing/model.py(4): initialize\n"
    if name == "lacks_class":
        return "Internal: AttributeError: module 'model' has no attribute 'TritonPythonModel'"
    searched = f"'{repository}/{name}/1' '{repository}/{name}' '{backends}/mine' "
    reasons = {
        "unknown": NO_LIBRARY.format("nowhere"),
        "bare": NO_LIBRARY.format("empty"),
        "above": NO_LIBRARY.format(".."),
        "here": NO_LIBRARY.format("."),
        "no_backend": NO_LIBRARY.format("identities"),
        "unknown_based": NOT_BASED.format("unknown_based", backends / "nowhere"),
        "python_based": NOT_BASED.format("python_based", backends / "python"),
        "no_library": NOT_FOUND.format("libtriton_mine.so", "no_library", searched),
        "other_source": NOT_FOUND.format("other.py", "other_source", searched),
        "far_library": NOT_FOUND.format("../../far.so", "far_library", searched),
        "escaping": ESCAPES.format("../beside.py", repository / "escaping" / "1", "escaping"),
    }
    return f"Invalid argument: {reasons[name]}"


@pytest.mark.parametrize("name", sorted(set(FAULTY) - {"is_packed"}))
def test_model_without_a_backend_is_refused(name: str, based: Server, backends: Path, based_repository: Path) -> None:
    reason = expected(name, backends, based_repository)
    text = f"load failed for model '{name}': version 1 is at UNAVAILABLE state: {reason};\n"
    assert load(based, name) == (400, text)


def test_archive_beside_the_source_is_the_environment_of_its_models(based: Server) -> None:
    status, error = load(based, "is_packed")
    assert status == 400
    assert "Internal: " in error and "ValueError: no is_packed" not in error  # the file is not an archive
