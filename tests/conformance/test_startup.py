"""How a server starts: failing models, readiness, version directories, several repositories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.raw import get, post, tensor
from tests.conformance.test_repository import BROKEN_MODEL, CONFIG, MODEL
from tests.conftest import Start
from tests.models import build, write

GOOD = {"1/model.py": MODEL.format(value=1)}
BROKEN = {"1/model.py": BROKEN_MODEL}


def test_broken_model_ends_the_server(tmp_path: Path, start: Start) -> None:
    write(tmp_path / "models", "good", CONFIG, GOOD)
    write(tmp_path / "models", "broken", CONFIG, BROKEN)
    with start(tmp_path / "models", log=tmp_path / "log", wait=False) as server:
        assert server.process.wait(60) == 1
    assert "failed to load all models" in (tmp_path / "log").read_text(errors="replace")


@pytest.fixture
def half_broken(tmp_path: Path) -> Path:
    write(tmp_path / "models", "good", CONFIG, GOOD)
    write(tmp_path / "models", "broken", CONFIG, BROKEN)
    write(tmp_path / "models", "unreadable", "nonsense {", GOOD)
    return tmp_path / "models"


def test_server_stays_with_what_loads_when_told_to(half_broken: Path, start: Start) -> None:
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with start(half_broken, *flags, log=half_broken.parent / "log") as server:
        assert get(server.http, "/v2/models/good/ready").status == 200
        assert get(server.http, "/v2/models/broken/ready").status == 400
        assert get(server.http, "/v2/models/broken").status == 404
        index = {entry["name"]: entry for entry in post(server.http, "/v2/repository/index").json()}
        assert index["good"]["state"] == "READY"
        assert index["broken"]["state"] == "UNAVAILABLE"
        assert "told to fail" in index["broken"]["reason"]


def test_server_with_a_broken_model_is_live_but_not_ready(half_broken: Path, start: Start) -> None:
    with start(half_broken, "--exit-on-error=false", log=half_broken.parent / "log", wait=False) as server:
        wait_until_listening(server)
        assert get(server.http, "/v2/health/live").status == 200
        wait_until_loaded(server, "good")
        assert get(server.http, "/v2/health/ready").status == 400


def wait_until_listening(server: object) -> None:
    from tests.events import eventually

    def listening() -> bool:
        try:
            return get(server.http, "/v2/health/live").status == 200  # type: ignore[attr-defined]
        except OSError:
            return False

    eventually(listening, "listening", 60)


def wait_until_loaded(server: object, model: str) -> None:
    from tests.events import eventually

    eventually(lambda: get(server.http, f"/v2/models/{model}/ready").status == 200, "loading", 60)  # type: ignore[attr-defined]


def test_directories_that_are_no_versions_are_left_out(tmp_path: Path, start: Start) -> None:
    files = {f"{name}/model.py": MODEL.format(value=1) for name in ("1", "02", "three", "4")}
    write(tmp_path / "models", "good", CONFIG + "version_policy { all { } }", files | {"configs/other.pbtxt": CONFIG})
    with start(tmp_path / "models", log=tmp_path / "log") as server:
        assert get(server.http, "/v2/models/good").json()["versions"] == ["1", "4"]


def test_two_repositories(tmp_path: Path, start: Start) -> None:
    write(tmp_path / "one", "a", CONFIG, GOOD)
    write(tmp_path / "two", "b", CONFIG, GOOD)
    with start(tmp_path / "one", f"--model-repository={tmp_path / 'two'}", log=tmp_path / "log") as server:
        assert get(server.http, "/v2/models/a/ready").status == 200
        assert get(server.http, "/v2/models/b/ready").status == 200


def test_model_of_the_same_name_in_two_repositories_is_unavailable(tmp_path: Path, start: Start) -> None:
    for repository in ("one", "two"):
        write(tmp_path / repository, "same", CONFIG, GOOD)
    write(tmp_path / "one", "other", CONFIG, GOOD)
    flags = (f"--model-repository={tmp_path / 'two'}", "--exit-on-error=false", "--strict-readiness=false")
    with start(tmp_path / "one", *flags, log=tmp_path / "log") as server:
        index = {entry["name"]: entry for entry in post(server.http, "/v2/repository/index").json()}
        assert index["other"]["state"] == "READY"
        assert index["same"].get("reason") == "model appears in two or more repositories"


def test_config_by_name(tmp_path: Path, start: Start) -> None:
    other = CONFIG.replace("dims: [ 1 ]", "dims: [ 7 ]")
    write(tmp_path / "models", "good", CONFIG, GOOD | {"configs/special.pbtxt": other})
    with start(tmp_path / "models", "--model-config-name=special", log=tmp_path / "log") as server:
        assert get(server.http, "/v2/models/good").json()["inputs"][0]["shape"] == [7]


def test_identifier_and_restricted_api(tmp_path: Path, start: Start) -> None:
    write(tmp_path / "models", "good", CONFIG, GOOD)
    flags = ("--id=shell", "--http-restricted-api=model-repository,statistics:admin-key=secret")
    with start(tmp_path / "models", *flags, log=tmp_path / "log") as server:
        assert get(server.http, "/v2").json()["name"] == "shell"
        refused = post(server.http, "/v2/repository/index")
        assert (refused.status, refused.error) == (403, "This API is restricted, expecting header 'admin-key'")
        assert post(server.http, "/v2/repository/index", headers={"admin-key": "wrong"}).status == 403
        assert post(server.http, "/v2/repository/index", headers={"admin-key": "secret"}).status == 200
        assert get(server.http, "/v2/models/stats").status == 403
        assert get(server.http, "/v2/models/good").status == 200


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--load-model=good",),
            "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
        (("--model-control-mode=sometimes",), "invalid argument for --model-control-mode"),
        (("--log-info=maybe",), "invalid value for bool option: maybe"),
        (("--no-such-flag=1",), "no-such-flag"),
    ],
    ids=["load-model", "mode", "bool", "unknown"],
)
def test_wrong_command_line(tmp_path: Path, start: Start, flags: tuple[str, ...], text: str) -> None:
    write(tmp_path / "models", "good", CONFIG, GOOD)
    with start(tmp_path / "models", *flags, log=tmp_path / "log", wait=False) as server:
        assert server.process.wait(60) != 0
    assert text in (tmp_path / "log").read_text(errors="replace")


@pytest.mark.parametrize(
    ("pattern", "forwarded"), [("my_.*", {"my_A": "1", "x-MY_b": "2"}), ("(?-i)my_", {"my_A": "1"})]
)
def test_headers_are_forwarded_as_they_were_sent(
    start: Start, tmp_path: Path, pattern: str, forwarded: dict[str, str]
) -> None:
    repository = build(tmp_path / "models", "echo_request")
    body = {"inputs": [tensor("INPUT", "BYTES", ["x"])]}
    with start(repository, f"--http-header-forward-pattern={pattern}") as server:
        headers = {"my_A": "1", "x-MY_b": "2", "other": "3"}
        reply = post(server.http, "/v2/models/echo_request/infer", body, headers)
    assert json.loads(reply.json()["outputs"][0]["data"][0])["parameters"] == forwarded


@pytest.mark.parametrize(
    ("name", "config", "files", "fault"),
    [
        (
            "tensor", 'backend: "python" input { name: "I" data_type: TYPE_FP32 }', {"notes.txt": ""},
            "model input 'I' must specify 'dims' for tensor",
        ),
        (
            "negative", CONFIG + "max_batch_size: -1", {"notes.txt": ""},
            "'max_batch_size' must be non-negative value for negative",
        ),
        (
            "renamed", CONFIG + 'name: "other" max_batch_size: -1', GOOD,
            "'max_batch_size' must be non-negative value for other",
        ),
        (
            "bare", None, GOOD,
            "failed to open text file for read {repository}/bare/config.pbtxt: No such file or directory",
        ),
    ],
)  # fmt: skip
def test_configuration_is_refused_before_versions_and_names_are_looked_at(
    name: str, config: str | None, files: dict[str, str], fault: str, tmp_path: Path, start: Start
) -> None:
    repository = write(tmp_path / "models", name, config, files).parent
    log = tmp_path / "log"
    with start(repository, "--disable-auto-complete-config", log=log, wait=False) as server:
        assert server.process.wait(60) == 1
    told = f"Poll failed for model directory '{name}': {fault.format(repository=repository)}"
    assert told in log.read_text(errors="replace")


def test_ensembles_that_contain_each_other_are_refused_for_that(tmp_path: Path, start: Start) -> None:
    tensors = 'platform: "ensemble" input { name: "A" data_type: TYPE_FP32 dims: 1 } '
    tensors += 'output { name: "B" data_type: TYPE_FP32 dims: 1 } '
    step = 'step {{ model_name: "{}" model_version: -1 input_map {{ key: "A" value: "A" }} '
    step += 'output_map {{ key: "B" value: "B" }} }}'
    for name, member in (("first", "second"), ("second", "first")):
        write(tmp_path / "models", name, f"{tensors}ensemble_scheduling {{ {step.format(member)} }}", {"1/.keep": ""})
    with start(tmp_path / "models", log=tmp_path / "log", wait=False) as server:
        assert server.process.wait(60) == 1
    text = (tmp_path / "log").read_text(errors="replace")
    for name, member in (("first", "second"), ("second", "first")):
        assert f"circular dependency between ensembles: {name} -> ... -> {member} -> {name}" in text
