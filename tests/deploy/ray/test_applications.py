"""Applications that scale, that have more models than replicas, and that cannot start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton_grpc

from benchmarks.cluster import measure, options
from tests.deploy.ray.cluster import Load, RayCluster, urls
from tests.events import eventually
from tests.models import HERE, build, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

MODELS = ("apple", "pear", "plum")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of three models that are alike."""
    repository = tmp_path_factory.mktemp("many") / "models"
    source = HERE / "ray" / "where"
    code = (source / "1" / "model.py").read_text()
    for name in MODELS:
        config = (source / "config.pbtxt").read_text()
        write(repository, name, config, {"1/model.py": code.replace('"first"', f'"{name}"')})
    return repository


@pytest.fixture
def no_application(cluster: RayCluster) -> Iterator[None]:
    yield
    assert cluster.remove() == 1, "an application was left behind"


def test_more_models_than_replicas_have_room_for(cluster: RayCluster, many: Path) -> None:
    ended = cluster.deploy(many, "--max-models-per-replica=1", "--min-replicas=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    try:
        url = next(iter(urls(ended.stdout, "http").values()))
        for name in (*MODELS, *MODELS):
            answer = requests.post(f"{url}/v2/models/{name}/generate", json={"text_input": "x"}, timeout=60)
            assert (answer.status_code, answer.json().get("ANSWER")) == (200, name), answer.text
        missing = requests.post(f"{url}/v2/models/cherry/generate", json={"text_input": "x"}, timeout=60)
        assert missing.status_code == 404
        address = next(iter(urls(ended.stdout, "grpc").values())).removeprefix("grpc://")
        with triton_grpc.InferenceServerClient(address) as client:
            text = triton_grpc.InferInput("text_input", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[b"x"]], np.object_))
            assert client.infer("plum", [text]).as_numpy("ANSWER")[0, 0] == b"plum"
    finally:
        cluster.remove()


def test_replicas_are_added_for_requests_that_come_straight_to_them_until_the_end(
    cluster: RayCluster, tmp_path: Path, no_application: None
) -> None:
    repository = build(tmp_path / "models", "where", group="ray")
    scaling = ("--max-replicas=2", "--target-ongoing-requests=2", "--upscale-delay-secs=0")
    with cluster.deploying(repository, *scaling) as process:
        assert process.stdout is not None
        said = ""
        while not urls(said, "http"):
            line = process.stdout.readline()
            assert line, "it has ended"
            said += line
        assert "where: 1 replica\n" in said
        with Load([next(iter(urls(said, "http").values()))], callers=8, seconds=0.05) as load:
            eventually(lambda: len({answer["PROCESS"] for answer in load.answers}) == 2, "a second replica", 150)
        assert load.failures == []
        process.terminate()  # as Ctrl+C, which a test in the background would not pass on
        assert process.wait(120) == 0


def test_a_model_that_does_not_load_is_one_sentence(cluster: RayCluster, tmp_path: Path, no_application: None) -> None:
    write(tmp_path / "models", "broken", 'backend: "python"', {"1/model.py": "raise RuntimeError('no such weights')"})
    ended = cluster.deploy(tmp_path / "models")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert ended.stderr.startswith("cannot start a replica of 'broken': ") and "no such weights" in ended.stderr


def test_a_port_that_is_taken_is_one_sentence(cluster: RayCluster, tmp_path: Path, no_application: None) -> None:
    repository = build(tmp_path / "models", "where", group="ray")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = cluster.deploy(repository, f"--http-port={port}")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"cannot start the ingress: Socket '127.0.0.1:{port}' already in use" in ended.stderr


def test_the_benchmark_measures_latency_and_throughput(
    cluster: RayCluster, no_application: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options(["--rounds=1", "--seconds=0.1", "--replicas=1,2", "--parts=latency,throughput"])
    measure(cluster, asked)
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = {row[0].strip(): [cell.strip(" *%") for cell in row[1:]] for row in rows if "---" not in row[0]}
    assert [float(cells[protocol][column]) > 0 for protocol in ("HTTP", "gRPC") for column in (0, 1)] == [True] * 4
    assert float(cells["1"][0]) > 0 and float(cells["2"][0]) > 0
