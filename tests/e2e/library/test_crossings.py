"""Features together: each works alone elsewhere, and here where it meets another one."""

from __future__ import annotations

import json
import mmap
import urllib.request
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conch
from conch.core.errors import Code, ConchError
from conch.repository import roots
from conch.repository.stores.root import StoreRoot
from conch.repository.stores.urls import StoreUrl
from tests.models import write
from tests.unit.repository.stores.fake_store import FakeStore

#: Adds NUMBER to its input.
ADDING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", values + np.int32(NUMBER))]) for values in inputs]
"""
#: Sums up a sequence, times NUMBER.
SUMMING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.total = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            self.total += int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
            total = np.array([NUMBER * self.total], np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)]))
        return responses
"""
TENSORS = """
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
PYTHON = f'backend: "python" {TENSORS}'
CACHED = PYTHON + "response_cache { enable: true }"
SEQUENCES = PYTHON + "sequence_batching { max_sequence_idle_microseconds: 60000000 }"


def program(source: str, number: int) -> dict[str, str]:
    return {"1/model.py": source.replace("NUMBER", str(number))}


def ensemble_of(model: str) -> str:
    maps = 'input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    step = f'step {{ model_name: "{model}" model_version: -1 {maps} }}'
    return f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {step} }}'


def cache_hits(server: conch.Server, model: str) -> int:
    [version] = server.statistics(model)
    hits: int = version["inference_stats"]["cache_hit"]["count"]
    return hits


def post(server: conch.Server, path: str, document: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.urls['http']}/v2/{path}", json.dumps(document).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.loads(reply.read() or b"{}")
    return answer


@pytest.fixture
def region() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=mmap.PAGESIZE)
    yield memory
    memory.close()
    memory.unlink()


def test_cached_response_is_of_the_values_in_the_region_and_is_written_to_the_region(
    tmp_path: Path, region: SharedMemory
) -> None:
    write(tmp_path, "m", CACHED, program(ADDING, 1))
    numbers = np.frombuffer(region.buf, np.int32)
    shared = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    request = {
        "inputs": [{"name": "X", "datatype": "INT32", "shape": [1], "parameters": shared}],
        "outputs": [{"name": "Y", "parameters": {**shared, "shared_memory_offset": 4}}],
    }
    with conch.Server(
        model_repository=tmp_path, http_port=0, allow_client_shm=True, cache_config="local,size=100000"
    ) as server:
        where = {"key": f"/{region.name}", "offset": 0, "byte_size": mmap.PAGESIZE}
        post(server, "systemsharedmemory/region/r/register", where)
        answers = []
        for value in (5, 5, 7, 5):
            numbers[:2] = value, 0
            post(server, "models/m/infer", request)
            answers.append(int(numbers[1]))
        assert answers == [6, 6, 8, 6]
        assert cache_hits(server, "m") == 2
        assert server.infer("m", {"X": [7]})["Y"] == [8]  # the same request without a region
        assert cache_hits(server, "m") == 3
        post(server, "systemsharedmemory/unregister", {})
    del numbers


def test_models_of_one_name_in_two_repositories_have_cached_responses_of_their_own(tmp_path: Path) -> None:
    for number, repository in enumerate(("one", "two"), 1):
        write(tmp_path / repository, "twin", CACHED, program(ADDING, number))
        write(tmp_path / repository, f"of_{repository}", ensemble_of("twin"), {"1/.keep": ""})
    with conch.Server(
        model_repository=[tmp_path / "one", tmp_path / "two"], model_namespacing=True, cache_config="local,size=100000"
    ) as server:
        for _ in range(2):
            assert [server.infer(name, {"X": [10]})["Y"].tolist() for name in ("of_one", "of_two")] == [[11], [12]]


def test_models_of_one_name_are_no_names_for_a_client(tmp_path: Path) -> None:
    for number, repository in enumerate(("one", "two"), 1):
        write(tmp_path / repository, "twin", PYTHON, program(ADDING, number))
    with conch.Server(
        model_repository=[tmp_path / "one", tmp_path / "two"], model_namespacing=True, http_port=0, grpc_port=0
    ) as server:
        for url in (server.urls["http"], server.urls["grpc"]):
            with conch.Client(url) as client:
                assert not client.ready("twin")
                assert [entry["name"] for entry in client.models()] == ["twin", "twin"]
                for call in (
                    client.metadata,
                    client.config,
                    lambda name, client=client: client.infer(name, {"X": [1]}),
                ):
                    with pytest.raises(ConchError, match="There are 2 identifiers of model 'twin'"):
                        call("twin")


def test_model_from_a_store_that_left_for_another_is_loaded_again_as_the_store_has_it_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        f"{name}/{path}": text.encode()
        for name in ("a", "b")
        for path, text in {"config.pbtxt": PYTHON, **program(ADDING, 1)}.items()
    }
    store = FakeStore(files)

    def opened(url: StoreUrl, cache: Path, *, whole: bool = False) -> StoreRoot:
        return StoreRoot(url, cache, whole=whole, opener=lambda url: store, pauses=())

    monkeypatch.setattr(roots, "StoreRoot", opened)
    with conch.Server(
        model_repository="s3://bucket/models",
        repository_cache_directory=str(tmp_path),
        model_control_mode="on-demand",
        max_loaded_models=1,
    ) as server:
        assert not [path for path in store.fetched if path.endswith("model.py")]
        assert server.infer("a", {"X": [1]})["Y"] == [2]
        assert server.infer("b", {"X": [1]})["Y"] == [2]
        assert store.fetched.count("a/1/model.py") == 1
        assert server.infer("a", {"X": [1]})["Y"] == [2]
        assert store.fetched.count("a/1/model.py") == 1  # it is still in the cache
        store.files["a/1/model.py"] = program(ADDING, 5)["1/model.py"].encode()
        assert server.infer("b", {"X": [1]})["Y"] == [2]
        assert server.infer("a", {"X": [1]})["Y"] == [6]
        store.failing = ConnectionError("the store is away")
        with pytest.raises(ConchError, match=r"model directory 'b': .* cannot be read: the store is away"):
            server.infer("b", {"X": [1]})
        assert server.infer("a", {"X": [1]})["Y"] == [6]


def test_sequence_of_a_replaced_version_has_to_start_again(tmp_path: Path) -> None:
    write(tmp_path, "m", SEQUENCES, program(SUMMING, 1))
    with conch.Server(model_repository=tmp_path, model_control_mode="explicit", load_model="m") as server:
        assert server.infer("m", {"X": [3]}, sequence_id=7, sequence_start=True)["Y"] == [3]
        assert server.infer("m", {"X": [4]}, sequence_id=7)["Y"] == [7]
        write(tmp_path, "m", SEQUENCES, program(SUMMING, 10))
        server.load("m")
        with pytest.raises(ConchError, match="must specify the START flag") as refused:
            server.infer("m", {"X": [5]}, sequence_id=7)
        assert refused.value.code is Code.INVALID_ARG
        assert server.infer("m", {"X": [6]}, sequence_id=7, sequence_start=True, sequence_end=True)["Y"] == [60]
