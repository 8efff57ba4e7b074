"""A network in TorchScript and as a ``torch.export`` program, served in batches and driven by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as httpclient
from numpy.typing import NDArray

from tests.conformance.raw import get, post, tensor
from tests.servers import ConchServer
from tests.torch_programs import Accumulate, Shout, classifier, save_exported, save_script

#: Its server compiles a program for a minute, on a busy machine for several.
pytestmark = pytest.mark.timeout(400)

#: As in the tutorial of Triton's backend: the file's tensors are numbered.
CONFIG = """
platform: "pytorch_libtorch"
max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 5 ] label_filename: "labels.txt" }
dynamic_batching { max_queue_delay_microseconds: 20000 }
instance_group { kind: KIND_CPU count: 2 }
"""
TEXTS = """
backend: "pytorch"
max_batch_size: 4
input { name: "texts" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUTPUT__0" data_type: TYPE_STRING dims: [ 1 ] }
"""
SUMS = """
backend: "pytorch"
max_batch_size: 4
input { name: "value" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 4 }
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "total" output_name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return classifier()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, network: torch.nn.Module) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("pytorch")
    save_script(network, folder / "models" / "script" / "1" / "model.pt")
    (folder / "models" / "script" / "config.pbtxt").write_text(CONFIG)
    (folder / "models" / "script" / "labels.txt").write_text("\n".join("abcde"))
    save_exported(network, (torch.zeros(2, 3, 8, 8),), folder / "models" / "exported" / "1" / "model.pt2")
    save_script(Shout(), folder / "models" / "shout" / "1" / "model.pt")
    (folder / "models" / "shout" / "config.pbtxt").write_text(TEXTS)
    save_script(Accumulate(), folder / "models" / "sums" / "1" / "model.pt")
    (folder / "models" / "sums" / "config.pbtxt").write_text(SUMS)
    save_script(network, folder / "models" / "bare" / "1" / "model.pt")
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with ConchServer(folder / "models", *flags, log=folder / "server.log") as server:
        yield server


def ask(server: ConchServer, model: str, name: str, images: NDArray[Any], classes: int = 0) -> NDArray[Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        given = httpclient.InferInput(name, list(images.shape), "FP32")
        given.set_data_from_numpy(images)
        wanted = httpclient.InferRequestedOutput("OUTPUT__0", class_count=classes)
        found: NDArray[Any] = client.infer(model, [given], outputs=[wanted]).as_numpy("OUTPUT__0")
        return found


@pytest.mark.parametrize(("model", "name"), [("script", "INPUT__0"), ("exported", "image")])
def test_requests_that_come_together_get_what_the_network_says(
    server: ConchServer, network: torch.nn.Module, model: str, name: str
) -> None:
    images = np.random.default_rng(1).random((12, 1, 3, 8, 8), np.float32)
    with ThreadPoolExecutor(12) as pool:
        found = np.concatenate(list(pool.map(lambda image: ask(server, model, name, image), images)))
    with torch.no_grad():
        assert np.allclose(found, network(torch.from_numpy(images[:, 0])).numpy(), atol=1e-5)
    [statistics] = get(server.http, f"/v2/models/{model}/stats").json()["model_stats"]
    assert (statistics["inference_count"], statistics["execution_count"] < 12) == (12, True)


def test_classes_are_named_by_the_labels(server: ConchServer, network: torch.nn.Module) -> None:
    images = np.random.default_rng(2).random((1, 3, 8, 8), np.float32)
    [[best]] = ask(server, "script", "INPUT__0", images, classes=1).tolist()
    with torch.no_grad():
        index = int(network(torch.from_numpy(images)).argmax())
    assert best.decode().endswith(f":{index}:{'abcde'[index]}")


def test_exported_program_is_its_own_configuration(server: ConchServer) -> None:
    config = get(server.http, "/v2/models/exported/config").json()
    assert (config["backend"], config["max_batch_size"], config["instance_group"][0]["count"]) == ("pytorch", 4, 1)
    assert [one["name"] for one in config["input"]] == ["image"]


def test_strings_are_served(server: ConchServer) -> None:
    reply = post(server.http, "/v2/models/shout/infer", {"inputs": [tensor("texts", "BYTES", ["a", "ü"], [2, 1])]})
    assert reply.json()["outputs"][0]["data"] == ["a!", "ü!"]


def test_sequence_keeps_its_state(server: ConchServer) -> None:
    def step(value: float, **parameters: bool) -> float:
        request = {"inputs": [tensor("value", "FP32", [value], [1, 1])], "parameters": {"sequence_id": 7, **parameters}}
        return float(post(server.http, "/v2/models/sums/infer", request).json()["outputs"][0]["data"][0])

    assert [step(1, sequence_start=True), step(2), step(3, sequence_end=True)] == [1, 3, 6]


def test_torchscript_without_a_configuration_says_what_is_missing(server: ConchServer) -> None:
    index = {entry["name"]: entry for entry in post(server.http, "/v2/repository/index").json()}
    assert index["bare"]["state"] == "UNAVAILABLE"
    assert "add them; forward takes image" in index["bare"]["reason"]
