"""The response cache of both servers: cached responses and their statistics."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.conformance.counts import settled
from tests.conformance.raw import get, post, tensor
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import build, write

#: Returns the number of its requests so far; fails for a negative input.
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()) for request in requests]

    def answer(self, given):
        self.count += 1
        if given[0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("told to fail"))
        outputs = [pb_utils.Tensor("COUNT", np.array([self.count], np.int32)), pb_utils.Tensor("OUTPUT", given)]
        return pb_utils.InferenceResponse(outputs)
"""
TENSORS = """
input { name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] }
output [{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "OUTPUT" data_type: TYPE_INT32 dims: [ -1 ] }]
"""
ENSEMBLE = """
ensemble_scheduling {
  step {
    model_name: "MEMBER" model_version: -1 input_map { key: "INPUT" value: "INPUT" }
    output_map { key: "COUNT" value: "COUNT" } output_map { key: "OUTPUT" value: "OUTPUT" }
  }
}
"""
CACHED = "response_cache { enable: true }"


@pytest.fixture(scope="module")
def cached(start: Start, server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A cache of 20,000 bytes; ``plain`` does not use it, ``member`` does, as one of two ensembles over each."""
    folder: Path = tmp_path_factory.mktemp(f"cache_{server_kind}")
    for name, cache in (("plain", ""), ("member", CACHED)):
        write(folder / "models", name, f'backend: "python" {TENSORS} {cache}', {"1/model.py": MODEL})
    for name, member, cache in (("outer", "plain", CACHED), ("inner", "member", "")):
        config = f'platform: "ensemble" {TENSORS} {ENSEMBLE.replace("MEMBER", member)} {cache}'
        write(folder / "models", name, config, {"1/.keep": ""})
    with start(folder / "models", "--cache-config=local,size=20000", log=folder / "log") as server:
        yield server


def count(server: Server, model: str, *values: int, **fields: Any) -> int:
    """Return the number of the execution that produced the response."""
    body = {"inputs": [tensor("INPUT", "INT32", list(values), [len(values)])], **fields}
    reply = post(server.http, f"/v2/models/{model}/infer", body)
    assert reply.status == 200, reply.body
    outputs = {output["name"]: output["data"] for output in reply.json()["outputs"]}
    assert outputs["OUTPUT"] == list(values)
    return int(outputs["COUNT"][0])


def counted(server: Server, model: str) -> dict[str, int]:
    def read() -> dict[str, int]:
        (statistics,) = get(server.http, f"/v2/models/{model}/stats").json()["model_stats"]
        counts = {name: entry["count"] for name, entry in statistics["inference_stats"].items()}
        return {"executions": statistics["execution_count"], "inferences": statistics["inference_count"], **counts}

    return settled(server, read)


def added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_same_inputs_are_answered_from_the_cache(cached: Server) -> None:
    before = counted(cached, "member")
    first = count(cached, "member", 10, id="a")
    assert count(cached, "member", 10, id="b") == first
    assert count(cached, "member", 11) == first + 1
    assert added(before, counted(cached, "member")) == {
        "executions": 2, "inferences": 2, "success": 3, "queue": 3, "compute_input": 2, "compute_infer": 2,
        "compute_output": 2, "cache_hit": 1, "cache_miss": 2,
    }  # fmt: skip


def test_model_without_the_cache_runs_each_time(cached: Server) -> None:
    first = count(cached, "plain", 20)
    assert count(cached, "plain", 20) == first + 1
    assert counted(cached, "plain")["cache_miss"] == 0


def test_ensemble_has_entries_of_its_own(cached: Server) -> None:
    before, member = counted(cached, "outer"), counted(cached, "plain")
    assert count(cached, "outer", 30) == count(cached, "outer", 30)
    assert added(member, counted(cached, "plain"))["executions"] == 1
    assert added(before, counted(cached, "outer"))["cache_hit"] == 1


def test_member_answers_its_ensemble_and_others_from_the_cache(cached: Server) -> None:
    before, member = counted(cached, "inner"), counted(cached, "member")
    assert count(cached, "inner", 40) == count(cached, "inner", 40) == count(cached, "member", 40)
    assert added(member, counted(cached, "member"))["cache_hit"] == 2
    gained = added(before, counted(cached, "inner"))
    assert gained["executions"] == 2 and "cache_hit" not in gained


def test_error_is_not_kept(cached: Server, server_kind: str) -> None:
    """Triton caches it as a response without outputs, and sends that for later requests."""
    body = {"inputs": [tensor("INPUT", "INT32", [-1], [1])]}
    replies = [post(cached.http, "/v2/models/member/infer", body) for _ in range(2)]
    assert replies[0].error == "told to fail"
    assert replies[1].status == (200 if server_kind == "triton" else 500)


def test_shape_and_outputs_count(cached: Server, server_kind: str) -> None:
    """Not in Triton, which returns outputs that were not requested."""
    body = {"inputs": [tensor("INPUT", "INT32", [50], [1])]}
    names = [
        [output["name"] for output in reply.json()["outputs"]]
        for wanted in ("OUTPUT", "COUNT")
        for reply in [post(cached.http, "/v2/models/member/infer", {**body, "outputs": [{"name": wanted}]})]
    ]
    assert names == [["OUTPUT"], ["OUTPUT" if server_kind == "triton" else "COUNT"]]


def test_oldest_entries_make_room(cached: Server) -> None:
    first = count(cached, "member", *[60] * 1000)
    for value in range(61, 66):
        count(cached, "member", *[value] * 1000)
    assert count(cached, "member", *[65] * 1000) == first + 5
    assert count(cached, "member", *[60] * 1000) == first + 6


def test_response_larger_than_the_cache_is_not_kept(cached: Server) -> None:
    first = count(cached, "member", *[70] * 6000)
    assert count(cached, "member", *[70] * 6000) == first + 1


def test_metrics_of_the_cache_are_of_models_that_use_it(cached: Server) -> None:
    with urllib.request.urlopen(f"http://{cached.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    per_model = {line.partition("{")[2].split('"')[1] for line in lines if line.startswith("nv_cache_num_hits_per_")}
    assert per_model == {"member", "outer"}
    assert {line.split(" ", 3)[2] for line in lines if line.startswith("# TYPE nv_cache_")} == {
        *(f"nv_cache_{name}_per_model" for name in ("num_hits", "hit_duration", "num_misses", "miss_duration")),
        *(f"nv_cache_num_{name}" for name in ("entries", "hits", "misses", "lookups", "evictions")),
        "nv_cache_util", "nv_cache_lookup_duration", "nv_cache_insertion_duration",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["local,sizes=3"], "Invalid argument - Failed to initialize LocalCache: config didn't contain a valid 'size'"),
        (["local,size=100000", "redis,host=x"],
         "Invalid argument - found multiple cache configurations, but only a single cache is currently supported"),
        (["local,size=abc"], "Failed to initialize LocalCache: "),
    ],
)  # fmt: skip
def test_server_does_not_start_with_a_wrong_cache(start: Start, tmp_path: Path, flags: list[str], error: str) -> None:
    (tmp_path / "models").mkdir()
    options = [f"--cache-config={flag}" for flag in flags]
    with start(tmp_path / "models", *options, log=tmp_path / "log", wait=False) as server:
        assert server.process.wait(60) == 1
    assert error in (tmp_path / "log").read_text()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_same_message_again_is_answered_with_the_same_and_counted(cached: Server, protocol: str) -> None:
    """The third time, conch does not decode it."""
    clients = {"http": httpclient, "grpc": grpcclient}
    given = clients[protocol].InferInput("INPUT", [2], "INT32")
    values = [80, 81 if protocol == "http" else 82]
    given.set_data_from_numpy(np.array(values, np.int32))
    before = counted(cached, "member")
    with clients[protocol].InferenceServerClient(getattr(cached, protocol)) as client:
        results = [client.infer("member", [given]) for _ in range(5)]
        named = client.infer("member", [given], request_id="mine")
    assert len({tuple(result.as_numpy("COUNT")) for result in (*results, named)}) == 1
    assert [list(result.as_numpy("OUTPUT")) for result in results] == [values] * 5
    assert id_of(named, protocol) == "mine" and not id_of(results[-1], protocol)
    gained = added(before, counted(cached, "member"))
    assert (gained["success"], gained["cache_hit"], gained["cache_miss"]) == (6, 5, 1)


def id_of(result: Any, protocol: str) -> str:
    response = result.get_response()
    return str(response.id if protocol == "grpc" else response.get("id", ""))


def test_response_that_is_larger_than_the_cache_is_logged(tmp_path: Path, start: Start) -> None:
    build(tmp_path / "models", "identity_fp32")
    config = tmp_path / "models" / "identity_fp32" / "config.pbtxt"
    config.write_text(config.read_text() + "\nresponse_cache { enable: true }\n")
    log = tmp_path / "log"
    with start(tmp_path / "models", "--cache-config=local,size=1048", log=log) as server:
        body = {"inputs": [tensor("INPUT", "FP32", [1.0] * 4000, [4000])]}
        assert post(server.http, "/v2/models/identity_fp32/infer", body).status == 200
        eventually(lambda: "Failed to insert key [" in log.read_text(errors="replace"), "the line in the log")
    told = log.read_text(errors="replace")
    assert re.search(r"into response cache: Requested byte_size: \d+ is greater than total cache size: 1048", told)
