"""What a starting server answers and says: before its models are loaded, while they load, and afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from conch import __version__
from tests.conformance.raw import get, post, tensor
from tests.e2e.conftest import Serve
from tests.events import Events, eventually
from tests.servers import ConchServer

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
"""
MODEL = """
import os, pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        while not (pathlib.Path(os.environ["EVENTS"]) / "load.go").exists():
            time.sleep(0.01)

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(one, "IN").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in values]
"""
BODY = {"inputs": [tensor("IN", "FP32", [1.5], [1])]}


def live(server: ConchServer) -> bool:
    try:
        return get(server.http, "/v2/health/live").status == 200
    except OSError:
        return False


def test_models_that_load_are_unavailable_and_services_start_when_they_have(
    serve: Serve, tmp_path: Path, events: Events
) -> None:
    for name in ("slow", "later"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(CONFIG)
        (tmp_path / "models" / name / "1" / "model.py").write_text(MODEL)
    server = serve(flags=("--model-load-thread-count=1",), wait=False)
    log = tmp_path / "server.log"
    eventually(lambda: live(server), "answering", 60)
    # Until the repository has been read, any name may be that of a model.
    eventually(lambda: post(server.http, "/v2/models/absent/infer", BODY).status == 404, "reading the repository", 60)
    for name in ("slow", "later"):
        reply = post(server.http, f"/v2/models/{name}/infer", BODY)
        assert (reply.status, reply.error) == (503, f"model '{name}' is not ready: it is being loaded")
        assert reply.headers["retry-after"] == "1"
    given = grpcclient.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([1.5], dtype=np.float32))
    with pytest.raises(grpcclient.InferenceServerException, match="UNAVAILABLE"):
        grpcclient.InferenceServerClient(server.grpc).infer("slow", [given])
    assert "Started HTTPService" not in log.read_text()

    events.set("load.go")
    eventually(lambda: "Started HTTPService" in log.read_text(), "loading", 60)
    assert post(server.http, "/v2/models/slow/infer", BODY).json()["outputs"][0]["data"] == [1.5]
    text = log.read_text()
    assert f"conch {__version__}" in text
    assert "instance slow_0 of 'slow' version 1: engine python 3." in text


def test_empty_repository_says_so(stack: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    log = tmp_path / "server.log"
    stack.enter_context(ConchServer(tmp_path / "models", log=log))
    assert f"the model repository is empty: {tmp_path / 'models'} has no folder of a model" in log.read_text()
