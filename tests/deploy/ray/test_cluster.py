"""A repository on a cluster of three nodes: what clients see, also while replicas and nodes die and are replaced."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import requests
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

import conch
from conch.core.errors import Code
from tests.deploy.ray.cluster import Load, RayCluster, ask, urls
from tests.events import eventually
from tests.models import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = build(tmp_path_factory.mktemp("ray") / "models", group="ray")
    return build(repository, "embedder", "joined", "talker", group="openai")


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    return ("--models=joined,sums,talker,ticks,where", "--min-replicas=2", "--cpus-per-replica=0.5")


@pytest.fixture(scope="module")
def said(cluster: RayCluster, served: Path, flags: tuple[str, ...]) -> Iterator[str]:
    ended = cluster.deploy(served, *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    yield ended.stdout
    cluster.remove()


def test_it_says_what_runs_where(said: str) -> None:
    assert "sums: 2 replicas" in said and "ticks: 2 replicas" in said and "where: 2 replicas" in said
    assert len(urls(said, "grpc")) == 3


def test_every_node_answers_for_every_model(said: str) -> None:
    for url in urls(said, "http").values():
        assert requests.get(f"{url}/v2/health/ready").status_code == 200
        assert ask(url)["ANSWER"] == "first"
        index = requests.post(f"{url}/v2/repository/index").json()
        assert [one["name"] for one in index] == ["joined", "sums", "talker", "ticks", "where"]


def test_openais_client_asks_an_ingress(said: str) -> None:
    url = next(iter(urls(said, "http").values()))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        assert {model.id for model in client.models.list()} >= {"joined", "talker"}
        chat = {"model": "talker", "messages": [{"role": "user", "content": "good day to you"}]}
        answer = client.chat.completions.create(**chat)
        assert (answer.choices[0].message.content, answer.usage.total_tokens) == ("good day to you", 8)
        chunks = list(client.chat.completions.create(**chat, stream=True))
        assert len(chunks) > 3
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "good day to you"
        assert len(client.embeddings.create(model="joined", input=["a", "b"]).data) == 2  # an ensemble


def test_requests_are_shared_by_the_replicas(said: str) -> None:
    url = next(iter(urls(said, "http").values()))
    assert len({ask(url, f"{number}")["PROCESS"] for number in range(20)}) == 2


def test_prompts_that_begin_alike_go_to_one_replica_from_everywhere(said: str) -> None:
    found = {ask(url, "a system prompt")["PROCESS"] for url in urls(said, "http").values() for _ in range(5)}
    assert len(found) == 1


def _number(client: object, kind: object, value: int, sequence: int, *, start: bool, end: bool) -> tuple[int, int]:
    tensor = kind.InferInput("INPUT", [1, 1], "INT32")  # type: ignore[attr-defined]
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    result = client.infer(  # type: ignore[attr-defined]
        "sums", [tensor], sequence_id=sequence, sequence_start=start, sequence_end=end
    )
    return int(result.as_numpy("SUM")[0, 0]), int(result.as_numpy("PROCESS")[0, 0])


def test_a_sequence_stays_on_its_replica_whichever_node_is_asked(said: str) -> None:
    clients = [triton_http.InferenceServerClient(url.removeprefix("http://")) for url in urls(said, "http").values()]
    processes: set[int] = set()
    # A hash of the correlation ID and the replica's URL selects the replica, and ports differ from run to run: 40
    # sequences are all on one of two replicas in one run of 2^39.
    for sequence in range(1, 41):
        found = [
            _number(clients[turn], triton_http, turn + 1, sequence, start=turn == 0, end=turn == 2) for turn in range(3)
        ]
        assert [total for total, _ in found] == [1, 3, 6]
        assert len({process for _, process in found}) == 1
        processes.add(found[0][1])
        if sequence >= 6 and len(processes) == 2:
            break
    assert len(processes) == 2


def _tick_inputs(count: int, mark: Path) -> list[triton_grpc.InferInput]:
    inputs = [triton_grpc.InferInput("COUNT", [1], "INT32"), triton_grpc.InferInput("MARK", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([count], np.int32))
    inputs[1].set_data_from_numpy(np.array([str(mark).encode()], np.object_))
    return inputs


def _ticks(address: str, count: int, mark: Path) -> list[int]:
    found: list[int] = []
    with triton_grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: found.append(-1 if error else int(result.as_numpy("TICK")[0])))
        client.async_stream_infer("ticks", _tick_inputs(count, mark))
        client.stop_stream()
    return found


def test_responses_are_streamed_over_both_protocols(said: str, tmp_path: Path) -> None:
    address = next(iter(urls(said, "grpc").values())).removeprefix("grpc://")
    assert _ticks(address, 3, tmp_path / "mark") == [0, 1, 2]
    url = next(iter(urls(said, "http").values()))
    body = {"COUNT": 3, "MARK": "unused"}
    with requests.post(f"{url}/v2/models/ticks/generate_stream", json=body, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert [json.loads(line.removeprefix(b"data: "))["TICK"] for line in lines] == [0, 1, 2]


def test_a_client_that_hangs_up_is_noticed_by_the_model(said: str, tmp_path: Path) -> None:
    url = next(iter(urls(said, "http").values()))
    body = {"COUNT": 600, "MARK": str(tmp_path / "gone")}
    with requests.post(f"{url}/v2/models/ticks/generate_stream", json=body, stream=True) as response:
        next(response.iter_lines())
    eventually((tmp_path / "gone").exists, "the model's notice")


def test_errors_keep_their_codes(said: str) -> None:
    url, address = next(iter(urls(said, "http").values())), next(iter(urls(said, "grpc").values()))
    missing = requests.post(f"{url}/v2/models/none/infer", json={"inputs": []})
    assert (missing.status_code, missing.json()) == (404, {"error": "Request for unknown model: 'none' is not found"})
    with triton_grpc.InferenceServerClient(address.removeprefix("grpc://")) as client:
        with pytest.raises(triton_grpc.InferenceServerException) as raised:
            _number(client, triton_grpc, 1, 0, start=False, end=False)
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    with conch.Client(address) as client, pytest.raises(conch.ConchError, match="utf-8") as failed:
        list(client.infer_stream("ticks", {"COUNT": np.array([1], np.int32), "MARK": [b"\xff"]}))
    assert failed.value.code is Code.INTERNAL


def test_a_replica_that_is_killed_loses_nothing_that_can_be_repeated(said: str) -> None:
    targets = list(urls(said, "http").values())
    with Load(targets, callers=6, seconds=0.02) as load:
        load.more(20)
        victim = load.answers[-1]["PROCESS"]
        os.kill(victim, signal.SIGKILL)
        load.more(60)
    assert load.failures == []
    eventually(
        lambda: len({ask(targets[0], f"{number}")["PROCESS"] for number in range(12)} - {victim}) == 2,
        "the replica's return",
        150,
    )


def test_a_new_version_is_rolled_out_without_a_failed_request(
    cluster: RayCluster, served: Path, said: str, flags: tuple[str, ...]
) -> None:
    model = served / "where" / "1" / "model.py"
    model.write_text(model.read_text().replace('"first"', '"second"'))
    with Load(list(urls(said, "http").values()), callers=3, seconds=0.02) as load:
        load.more(10)
        ended = cluster.deploy(served, *flags)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        load.more(10)
    assert load.failures == []
    answers = [answer["ANSWER"] for answer in load.answers]
    assert answers[0] == "first" and set(answers[-5:]) == {"second"}
    assert urls(ended.stdout, "grpc") == urls(said, "grpc")  # ingresses, and what has not changed, stay


def test_a_version_that_does_not_load_leaves_the_old_one(
    cluster: RayCluster, served: Path, said: str, flags: tuple[str, ...]
) -> None:
    model = served / "where" / "1" / "model.py"
    good = model.read_text()
    model.write_text("raise RuntimeError('no such weights')\n")
    try:
        ended = cluster.deploy(served, *flags)
    finally:
        model.write_text(good)
    assert ended.returncode == 1
    assert "cannot start a replica of 'where'" in ended.stderr and "no such weights" in ended.stderr
    assert ask(next(iter(urls(said, "http").values())))["ANSWER"] == "second"


def test_a_node_that_dies_loses_nothing_that_can_be_repeated(
    cluster: RayCluster, served: Path, said: str, flags: tuple[str, ...]
) -> None:
    restored = cluster.deploy(served, *flags)
    assert restored.returncode == 0, restored.stdout + restored.stderr
    by_node = urls(restored.stdout, "http")
    head = cluster.head()
    url = by_node[head[:8]]
    with Load([url], callers=4, seconds=0.02) as load:
        load.more(20)
        cluster.kill(
            next(
                replica.node for replica in cluster.replicas() if replica.deployment == "where" and replica.node != head
            )
        )
        load.more(60)
    assert load.failures == []
    eventually(
        lambda: len({ask(url, f"{number}")["PROCESS"] for number in range(12)}) == 2, "the replica's return", 150
    )
