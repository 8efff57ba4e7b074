"""Repositories in a real S3 server: models are served, changed, unloaded, and outlive the store."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from conch.core.errors import Code, ConchError
from conch.repository.scan import ModelRepository
from conch.repository.stores.urls import parse_url
from tests.servers import CONCH, ConchServer
from tests.unit.checkpoints.fake_hub import FakeHub

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
ENSEMBLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "add" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" }
} }
"""
PROGRAM = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(one, "IN").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one + %d)]) for one in given]
"""
SECRET = "hidden-in-all-messages"


class Store:
    """An S3 server with one bucket, which can be away for a while."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.host, self.port = self._server.get_host_and_port()
        self.place = f"s3://{self.host}:{self.port}/models"
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://{self.host}:{self.port}",
            aws_access_key_id="key",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="models")

    def put(self, path: str, content: str | bytes) -> None:
        self.client.put_object(Bucket="models", Key=path, Body=content)

    def remove(self, path: str) -> None:
        self.client.delete_object(Bucket="models", Key=path)

    def put_model(self, path: str, amount: int, version: int = 1, config: str = CONFIG) -> None:
        """A model that adds ``amount``."""
        self.put(f"{path}/{version}/model.py", PROGRAM % amount)
        self.put(f"{path}/config.pbtxt", config)

    def stop(self) -> None:
        self._server.stop()

    def come_back(self) -> None:
        """Listen at the same port, with the same bucket."""
        self._server = ThreadedMotoServer(self.host, self.port, verbose=False)
        self._server.start()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.stop()


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Starts a server over a repository; returns it and its log."""
    servers: list[ConchServer] = []

    def start(place: str, *flags: str, cache: Path | None = None) -> tuple[ConchServer, Path]:
        folder = tmp_path_factory.mktemp("server")
        cached = f"--repository-cache-directory={cache or folder / 'cache'}"
        server = ConchServer(place, cached, *flags, log=folder / "log", env=environment)
        servers.append(server)
        return server.__enter__(), folder / "log"

    yield start
    for server in servers:
        server.stop()


def post(server: ConchServer, path: str, body: object = None) -> Any:
    data = json.dumps(body or {}).encode()
    with urllib.request.urlopen(f"http://{server.http}/v2/{path}", data, timeout=60) as response:
        return json.loads(response.read() or b"null")


def answer(server: ConchServer, model: str) -> float:
    """What a model makes of 1."""
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
    return float(post(server, f"models/{model}/infer", body)["outputs"][0]["data"][0])


def index(server: ConchServer) -> dict[str, str]:
    return {one["name"]: one.get("state", "") for one in post(server, "repository/index")}


def wait_until(true: Callable[[], bool]) -> None:
    deadline = monotonic() + 60
    while not true():
        assert monotonic() < deadline
        sleep(0.05)


def lines(log: Path, *words: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if all(word in line for word in words)]


def test_changes_are_served_and_a_store_that_is_away_changes_nothing(store: Store, started: Callable[..., Any]) -> None:
    store.put_model("polled/add", 1)
    server, log = started(f"{store.place}/polled", "--model-control-mode=poll", "--repository-poll-secs=1")
    assert answer(server, "add") == 2
    store.put_model("polled/add", 10)
    store.put("polled/both/config.pbtxt", ENSEMBLE)
    wait_until(lambda: index(server) == {"add": "READY", "both": "READY"} and answer(server, "add") == 11)
    assert answer(server, "both") == 11
    assert lines(log, "downloading model 'add' from s3://", "2 files")

    store.stop()
    try:
        wait_until(lambda: bool(lines(log, "cannot be read", "models continue to serve")))
        assert answer(server, "both") == 11
        assert index(server) == {"add": "READY", "both": "READY"}
    finally:
        store.come_back()
    store.remove("polled/both/config.pbtxt")
    wait_until(lambda: index(server).get("both") == "UNAVAILABLE")
    assert len(lines(log, "cannot be read")) == 1
    assert lines(log, "can be read again")
    assert SECRET not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_what_could_not_be_downloaded_is_tried_again(store: Store, started: Callable[..., Any], tmp_path: Path) -> None:
    store.put_model("again/add", 1)
    server, log = started(
        f"{store.place}/again", "--model-control-mode=poll", "--repository-poll-secs=1", cache=tmp_path
    )
    [folder] = tmp_path.iterdir()
    (folder / "other").touch()  # where the folder of its copies should be
    store.put_model("again/other", 2)
    store.put("again/both/config.pbtxt", ENSEMBLE.replace('"add"', '"other"'))
    wait_until(lambda: bool(lines(log, "no copy of", "again/other")))
    (folder / "other").unlink()
    wait_until(lambda: index(server) == {"add": "READY", "both": "READY", "other": "READY"})
    assert answer(server, "both") == 3


def test_models_are_loaded_and_unloaded_on_request(store: Store, started: Callable[..., Any], tmp_path: Path) -> None:
    for version in (1, 2):
        store.put_model("asked/add", version, version)
    server, log = started(f"{store.place}/asked", "--model-control-mode=explicit", cache=tmp_path)
    assert index(server) == {"add": ""}
    assert not list(tmp_path.rglob("model.py"))
    post(server, "repository/models/add/load")
    assert answer(server, "add") == 3
    [copied] = tmp_path.rglob("model.py")
    assert copied.parent.name == "2"

    post(server, "repository/models/add/load", {"parameters": {"config": json.dumps(
        {"backend": "python", "version_policy": {"specific": {"versions": [1]}},
         "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
         "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}]}
    )}})  # fmt: skip
    assert answer(server, "add") == 2
    wait_until(lambda: not copied.exists())

    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "repository/models/absent/load")
    assert refused.value.code == 500  # as for a directory
    post(server, "repository/models/add/unload")
    wait_until(lambda: index(server) == {"add": "UNAVAILABLE"})
    server.stop()
    assert server.process.returncode == 0

    log.unlink()
    again, log = started(f"{store.place}/asked", "--model-control-mode=on-demand", "--load-model=add", cache=tmp_path)
    assert answer(again, "add") == 3
    assert lines(log, "downloading model 'add'", "1 file,")  # the first version's copy had the configuration
    again.stop()
    third, log = started(f"{store.place}/asked", cache=tmp_path)
    assert answer(third, "add") == 3
    assert lines(log, "is unchanged since its last download")
    assert not lines(log, "downloading model")
    third.stop()


def test_two_servers_that_start_together_download_once(
    store: Store, started: Callable[..., Any], tmp_path: Path
) -> None:
    store.put_model("shared/add", 1)
    store.put("shared/add/1/weights", b"w" * (8 << 20))
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: started(f"{store.place}/shared", cache=tmp_path), range(2)))
    assert [answer(server, "add") for server, _ in both] == [2, 2]
    assert sum(len(lines(log, "downloading model 'add'", "3 files")) for _, log in both) == 1
    assert sum(len(lines(log, "is unchanged since its last download")) for _, log in both) == 1
    for server, _ in both:
        server.stop()


def test_directories_buckets_and_the_hub_are_one_repository(
    store: Store, environment: dict[str, str], tmp_path: Path
) -> None:
    store.put_model("mixed/bucket", 1)
    local = tmp_path / "models" / "local"
    (local / "1").mkdir(parents=True)
    (local / "config.pbtxt").write_text(CONFIG)
    (local / "1" / "model.py").write_text(PROGRAM % 2)
    files = {"models/hub/config.pbtxt": CONFIG.encode(), "models/hub/1/model.py": (PROGRAM % 3).encode()}
    with FakeHub({"org/models": files}).listening() as hub:
        places = [f"--model-repository={store.place}/mixed", "--model-repository=hf://org/models/models"]
        settings = {**environment, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        settings["TRITON_AWS_MOUNT_DIRECTORY"] = str(tmp_path / "aws")
        settings["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        log = tmp_path / "log"
        with ConchServer(tmp_path / "models", *places, log=log, env=settings) as server:
            assert [answer(server, name) for name in ("bucket", "local", "hub")] == [2, 3, 4]
    assert len(list(tmp_path.glob("aws/s3-models-*/bucket/1/bucket/1/model.py"))) == 1
    assert len(list(tmp_path.glob("cache/conch/repositories/hf-org--models-*/hub/1/hub/1/model.py"))) == 1
    assert "Traceback" not in log.read_text()


def refusal(place: str, cache: Path) -> ConchError:
    repository = ModelRepository([parse_url(place)], cache=str(cache))
    with pytest.raises(ConchError) as refused:
        repository.open()
    repository.close()
    assert SECRET not in refused.value.message
    assert "\n" not in refused.value.message
    return refused.value


@pytest.fixture
def credentials(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_what_cannot_be_read_is_reported_in_a_sentence(
    store: Store, credentials: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_model("told/add", 1)
    absent = refusal(store.place.replace("models", "absent"), tmp_path)
    assert (absent.code, "bucket does not exist" in absent.message) == (Code.INVALID_ARG, True)
    assert "has no files there" in refusal(f"{store.place}/nothing", tmp_path).message
    assert "is a model, not a repository" in refusal(f"{store.place}/told/add", tmp_path).message

    administer(store, "0")
    denied = refusal(f"{store.place}/told", tmp_path)
    administer(store, "inf")
    assert denied.code is Code.INVALID_ARG
    assert "may not be read" in denied.message
    assert "check AWS_ACCESS_KEY_ID" in denied.message

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    assert "check AWS_ACCESS_KEY_ID" in refusal(f"{store.place}/told", tmp_path).message


def administer(store: Store, unchecked: str) -> None:
    """How many further requests the server accepts without looking at their signatures."""
    place = f"http://{store.host}:{store.port}/moto-api/reset-auth"
    request = urllib.request.Request(place, unchecked.encode(), {"Content-Type": "text/plain"})
    urllib.request.urlopen(request, timeout=60).close()


def test_server_does_not_start_where_the_store_cannot_be_reached(environment: dict[str, str], tmp_path: Path) -> None:
    command = [str(CONCH), "serve", "--model-repository=s3://127.0.0.1:9/models", "--http-port=0", "--grpc-port=0"]
    ended = subprocess.run(
        [*command, "--metrics-port=0"], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(
        "error: creating server: Unavailable - model repository s3://127.0.0.1:9/models cannot be read"
    )
    assert SECRET not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_large_file_is_read_in_parts_and_verified(
    store: Store, credentials: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * (20 << 12)
    store.put("large/m/1/weights", content)
    parts = [{"ETag": None, "PartNumber": number} for number in (1, 2)]
    upload = store.client.create_multipart_upload(Bucket="models", Key="large/m/1/parts")["UploadId"]
    for part in parts:
        part["ETag"] = store.client.upload_part(
            Bucket="models", Key="large/m/1/parts", UploadId=upload, PartNumber=part["PartNumber"], Body=content
        )["ETag"]
    store.client.complete_multipart_upload(
        Bucket="models", Key="large/m/1/parts", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    store.client.put_object(
        Bucket="models", Key="large/m/1/encrypted", Body=b"x" * 100, ServerSideEncryption="aws:kms", SSEKMSKeyId="key"
    )
    repository = ModelRepository([parse_url(f"{store.place}/large")], cache=str(tmp_path))
    version = repository.directory("m") / "1"
    assert (version / "weights").read_bytes() == content
    assert (version / "parts").read_bytes() == content * 2
    assert (version / "encrypted").read_bytes() == b"x" * 100
    repository.close()


def test_repository_is_checked(store: Store, environment: dict[str, str], tmp_path: Path) -> None:
    store.put_model("checked/add", 1)
    store.put("checked/bad/config.pbtxt", 'backend: "python"\nmax_batch_size: many\n')
    ended = subprocess.run(
        [str(CONCH), "check", f"{store.place}/checked"],
        env={**os.environ, **environment, "TRITON_AWS_MOUNT_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert f"{store.place}/checked/bad/config.pbtxt:2: error: failed to read text proto" in ended.stdout
    assert str(tmp_path) not in ended.stdout
