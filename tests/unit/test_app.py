"""What the command ``conch serve`` says at its end: why the server could not start, in one line."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from conch import app, logs
from conch.settings import Settings
from tests.models import write


@pytest.fixture(autouse=True)
def no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process's logging as it is."""
    monkeypatch.setattr(logs, "setup", lambda settings: None)


def refusal(settings: Settings, capsys: pytest.CaptureFixture[str], hub_hint: str = "") -> str:
    """The last line of a server that does not start."""
    assert app.run(settings, hub_hint=hub_hint) == 1
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


@pytest.mark.parametrize(("backend", "hinted"), [("of the Hub", True), ("absent", False)])
def test_hint_about_the_hub_is_given_where_the_hub_is_the_reason(
    backend: str, hinted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "models", "m", f'backend: "{backend}"', {"1/model.py": ""})
    line = refusal(settings_of(tmp_path / "models"), capsys, hub_hint="there is no folder 'm' here either")
    assert line.endswith("; there is no folder 'm' here either") == hinted


def test_model_that_there_is_not_is_answered_with_the_one_that_was_meant(
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


def test_last_line_of_the_log_is_that_the_server_has_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="conch"):
        assert app.run(settings_of(tmp_path), lambda *_: os.kill(os.getpid(), signal.SIGINT)) == 0
    assert caplog.messages[-1] == "The server has stopped."
