"""More models than fit: each is loaded when a request asks for it."""

from __future__ import annotations

import json
import queue
import random
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.events import eventually
from tests.servers import ConchServer

MODELS, FIT, HOT = 50, 10, 5
CLIENTS, REQUESTS = 8, 15
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one + ADDED)]) for one in inputs]
"""
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        calls = [
            pb_utils.InferenceRequest(
                model_name="m7",
                requested_output_names=["y"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "x")],
            ).exec()
            for request in requests
        ]
        return [pb_utils.InferenceResponse(call.output_tensors(), call.error()) for call in calls]
"""
COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.total = np.zeros(1, np.float32)

    def execute(self, requests):
        responses = []
        for request in requests:
            if pb_utils.get_input_tensor_by_name(request, "START").as_numpy().any():
                self.total = np.zeros(1, np.float32)
            self.total = self.total + pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", self.total)]))
        return responses
"""
COUNTER_CONFIG = """
backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching { max_sequence_idle_microseconds: 60000000 control_input { name: "START" control {
  kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]
} } }
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 0
input [{name: "x" data_type: TYPE_FP32 dims: [1]}] output [{name: "y" data_type: TYPE_FP32 dims: [1]}]
ensemble_scheduling {step [
  {model_name: "m8" model_version: -1 input_map {key: "x" value: "x"} output_map {key: "y" value: "z"}},
  {model_name: "m9" model_version: -1 input_map {key: "x" value: "z"} output_map {key: "y" value: "y"}}
]}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")

    def write(name: str, model: str, config: str = "") -> None:
        (root / name / "1").mkdir(parents=True)
        if model:
            (root / name / "1" / "model.py").write_text(model)
        if config:
            (root / name / "config.pbtxt").write_text(config)

    for number in range(MODELS):
        write(f"m{number}", f"ADDED = {number}\n{MODEL}")
    for name in ("spare", "other_spare"):
        write(name, f"ADDED = 100\n{MODEL}")
    write("slow", f"import time\ntime.sleep(0.5)\nADDED = 100\n{MODEL}")
    for number in range(4):
        write(f"heavy{number}", f"BALLAST = b'x' * (40 << 20)\nADDED = {number}\n{MODEL}")
    write("caller", CALLER)
    write("chain", "", ENSEMBLE)
    write("counter", COUNTER, COUNTER_CONFIG)
    write("broken", "raise RuntimeError('it is broken')")
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ConchServer]:
    flags = ("--model-control-mode=on-demand", f"--max-loaded-models={FIT}", "--load-model=m0", "--load-wait-secs=120")
    with ConchServer(repository, *flags) as server:
        yield server


def ask(server: ConchServer, path: str, document: object | None = None) -> tuple[int, str]:
    data = None if document is None else json.dumps(document).encode()
    try:
        with urllib.request.urlopen(f"http://{server.http}{path}", data, 150) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def add(server: ConchServer, name: str, value: float) -> float:
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [value]}
    status, body = ask(server, f"/v2/models/{name}/infer", {"inputs": [tensor]})
    assert status == 200, body
    return json.loads(body)["outputs"][0]["data"][0]


def metric(server: ConchServer, name: str) -> float:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def index(server: ConchServer) -> dict[str, str]:
    _, body = ask(server, "/v2/repository/index", {})
    return {entry["name"]: entry.get("state", "") for entry in json.loads(body)}


def test_every_request_is_answered_although_a_fifth_of_the_models_fit(server: ConchServer) -> None:
    def work(seed: int) -> list[tuple[str, float, float]]:
        dice = random.Random(seed)
        answers = []
        for value in range(REQUESTS):
            number = dice.randrange(HOT) if dice.random() < 0.8 else dice.randrange(MODELS)
            answers.append((f"m{number}", value + number, add(server, f"m{number}", value)))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [answer for part in pool.map(work, range(CLIENTS)) for answer in part]
    assert len(answers) == CLIENTS * REQUESTS
    assert [name for name, expected, got in answers if expected != got] == []
    states = index(server)
    assert sum(state == "READY" for state in states.values()) <= FIT and states["m0"] == "READY"
    assert metric(server, "conch_demand_loaded_models") <= FIT
    assert metric(server, "conch_demand_evictions") > 0 and metric(server, "conch_demand_refused") == 0
    assert metric(server, "conch_demand_waits") < len(answers) / 2, "the models that are asked for most stay"


def test_clients_that_look_before_they_ask_find_the_model(server: ConchServer) -> None:
    with tritonclient.http.InferenceServerClient(server.http, network_timeout=150, connection_timeout=150) as client:
        assert client.is_server_ready() and client.is_model_ready("spare")
        assert not client.is_model_ready("nobody")
        assert client.get_model_metadata("spare")["inputs"][0]["name"] == "x"
        assert client.get_model_config("other_spare")["name"] == "other_spare"
        assert index(server)["other_spare"] == "READY"


def test_grpc_waits_for_the_load_and_keeps_to_deadlines(server: ConchServer) -> None:
    tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.array([1], np.float32))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(tritonclient.grpc.InferenceServerException) as caught:
            client.infer("slow", [tensor], client_timeout=0.2)
        assert caught.value.status() == str(grpc.StatusCode.DEADLINE_EXCEEDED)
        assert client.is_model_ready("slow")
        assert client.infer("slow", [tensor]).as_numpy("y") == [101]


def test_ensemble_and_models_that_call_others_load_what_they_need(server: ConchServer) -> None:
    assert add(server, "chain", 1) == 18
    assert add(server, "caller", 1) == 8


def test_model_that_cannot_be_loaded_says_why_and_is_not_tried_for_every_request(server: ConchServer) -> None:
    status, body = ask(server, "/v2/models/broken/infer", {"inputs": []})
    assert status == 503 and "it is broken" in body

    def waits() -> bool:
        status, body = ask(server, "/v2/models/broken/infer", {"inputs": []})
        assert status == 503
        return re.search(r"model 'broken' failed to load, and is tried again in \d+ s", body) is not None

    eventually(waits, "a request before the next try, which a busy machine may miss")
    assert ask(server, "/v2/models/broken/ready")[0] == 400
    assert ask(server, "/v2/health/ready")[0] == 200
    assert ask(server, "/v2/models/nobody/infer", {"inputs": []})[0] == 404


def test_models_are_loaded_ahead_and_unloaded_by_name(server: ConchServer) -> None:
    assert ask(server, "/v2/repository/models/spare/load", {})[0] == 200
    assert index(server)["spare"] == "READY"
    assert ask(server, "/v2/repository/models/spare/unload", {})[0] == 200
    assert add(server, "spare", 1) == 101
    status, body = ask(server, "/v2/repository/models/spare/load", {"parameters": {"config": "{}"}})
    assert status == 400 and "loaded on demand, from the repository alone" in body


def test_sequences_of_a_stream_keep_their_order_through_loads(repository: Path) -> None:
    with ConchServer(repository, "--model-control-mode=on-demand", "--max-loaded-models=1") as server:
        for number in range(1, 6):
            assert add(server, "spare", 1) == 101  # the counter leaves
            with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
                answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
                client.start_stream(lambda result, error, answers=answers: answers.put((result, error)))
                for step in (1, 2, 3, 4):
                    tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
                    tensor.set_data_from_numpy(np.array([step], np.float32))
                    client.async_stream_infer(
                        "counter", [tensor], sequence_id=number, sequence_start=step == 1, sequence_end=step == 4
                    )
                got = [answers.get(timeout=60) for _ in range(4)]
                client.stop_stream()
            assert [error for _, error in got if error] == []
            assert [result.as_numpy("y").tolist() for result, _ in got] == [[1], [3], [6], [10]]


def test_models_leave_when_their_memory_is_more_than_the_budget(repository: Path) -> None:
    weights = repository / "spare" / "1" / "weights.safetensors"
    with weights.open("wb") as file:
        file.truncate(8 << 30)  # of which the disk keeps nothing
    with ConchServer(repository, "--model-control-mode=on-demand", "--memory-budget=100MiB") as server:
        for number in range(4):
            assert add(server, f"heavy{number}", 1) == 1 + number
        assert 1 <= metric(server, "conch_demand_loaded_models") <= 2
        assert metric(server, "conch_demand_evictions") > 0
        status, body = ask(server, "/v2/models/spare", None)
        assert status == 503
        assert json.loads(body)["error"] == (
            "model 'spare' cannot be loaded: 8224 MiB are more than --memory-budget=100 MiB"
        )
