"""What the command ``conch serve`` says at its end: why the server could not start, in one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conch.cli import main
from conch.library import app
from conch.machine import logs
from conch.options.settings import Settings
from tests.models import write


@pytest.fixture(autouse=True)
def no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process's logging as it is."""
    monkeypatch.setattr(logs, "setup", lambda settings: None)


def refusal(settings: Settings, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a server that does not start."""
    assert app.run(settings) == 1
    return capsys.readouterr().err.splitlines()[-1]


def settings_of(repository: Path, load: tuple[str, ...] = ()) -> Settings:
    """Those of a server without ports, which loads everything, or the models ``load``."""
    mode = "explicit" if load else "none"
    settings = Settings(model_repository=(str(repository),), model_control_mode=mode, load_model=load)
    return replace(settings, allow_http=False, allow_grpc=False, allow_metrics=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path / "models", "greeter", 'backend: "absent"', {"1/model.py": ""})
    return tmp_path / "models"


def test_failed_model_s_reason_is_one_whole_sentence(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(settings_of(repository), capsys)
    assert line.startswith("error: creating server: Internal - failed to load all models ('greeter': load failed")
    assert line.endswith(")") and not line.endswith(";)")


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        ('backend: "tensorrt"', {"1/model.plan": ""}, "greeter/config.pbtxt:1: error: "),
        ('backend: "python"', {"1/modle.py": "class TritonPythonModel:\n    pass"}, "(fix: rename it model.py)"),
        ('backend: "python"', {"1/model.py": "class Model:\n    pass"}, "the class TritonPythonModel is missing"),
    ],
)
def test_command_ends_with_the_errors_of_conch_check(
    config: str,
    files: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "models", "greeter", config, files)
    monkeypatch.chdir(tmp_path)
    flags = [f"--allow-{one}=false" for one in ("http", "grpc", "metrics")]
    assert main(["serve", "--model-repository=models", *flags]) == 1
    error, *lines = capfd.readouterr().err.splitlines()
    assert error.startswith("error: creating server: Internal - failed to load all models ('greeter': load failed")
    (line,) = [one for one in lines if one.startswith("conch check: models/greeter/")]
    assert said in line


def test_model_that_does_not_exist_is_answered_with_the_one_that_was_meant(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(settings_of(repository, ("gretter",)), capsys)
    assert f"there is no model 'gretter' in {repository}; did you mean 'greeter'?" in line
    line = refusal(settings_of(repository, ("other",)), capsys)
    assert f"there is no model 'other' in {repository}; its models are greeter)" in line
    line = refusal(replace(settings_of(repository), debug="gretter"), capsys)
    assert line.endswith(f"there is no model 'gretter' in {repository}; did you mean 'greeter'?")


def test_server_with_nothing_to_serve_names_both_ways_to_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(Settings(), capsys)
    assert line.endswith("--model-repository must be specified, or one MODEL: conch serve MODEL")


async def test_front_ends_listen_in_the_order_of_tritons_log_lines(
    repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable, route in (("AIP_HEALTH_ROUTE", "/health"), ("AIP_PREDICT_ROUTE", "/predict")):
        monkeypatch.setenv(variable, route)
    names = ("grpc", "http", "openai", "sagemaker", "vertex-ai", "oci", "metrics")
    options: dict[str, Any] = {f"{name}_port".replace("-", "_"): 0 for name in names}
    options |= {f"allow_{platform}": True for platform in ("sagemaker", "vertex_ai", "oci")}
    settings = Settings(model_repository=(str(repository),), platform_address="127.0.0.1", **options)
    application = app.Application(settings)
    with caplog.at_level("INFO", "conch"):
        await application.listen()
    await application.stop(0)
    assert tuple(application.addresses) == names
    services = caplog.records[-1].getMessage().partition(": ")[2].split(", ")
    assert [service.partition(" at ")[0] for service in services] == [
        "GRPCInferenceService", "HTTPService", "OpenAI API", "Sagemaker HTTPService", "Vertex AI HTTPService",
        "OCI Data Science HTTPService", "Metrics Service", "Console",
    ]  # fmt: skip


def test_last_line_of_the_log_is_that_the_server_has_stopped(tmp_path: Path) -> None:
    flags = (f"--allow-{one}=false" for one in ("http", "grpc", "metrics"))
    command = [sys.executable, "-m", "conch", "serve", f"--model-repository={tmp_path}", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        next(line for line in server.stderr if "the model repository is empty" in line)
        server.send_signal(signal.SIGINT)
        assert server.stderr.readlines()[-1].endswith('"The server has stopped."\n')
    assert server.returncode == 0
