"""A mistyped command or flag is answered with the right one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conch.cli import main


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["chek", "models"], "unrecognized command 'chek'; did you mean 'check'?"),
        (["Serve"], "unrecognized command 'Serve'; did you mean 'serve'?"),
        (["start"], "unrecognized command 'start'; did you mean 'serve'?"),
        (["optimze"], "unrecognized command 'optimze'; did you mean 'convert'?"),
        (["xyzzy"], "unrecognized command 'xyzzy'; the commands are serve, check, "),
        (["org/name"], "'org/name' is not a command; did you mean 'conch serve org/name'?"),
        (
            ["serve", "--model-repositroy=x"],
            "unrecognized option '--model-repositroy'; did you mean '--model-repository'?",
        ),
        (["serve", "--model_repository", "x"], "unrecognized option '--model_repository'; did you mean '--model-rep"),
        (["serve", "--HTTP_PORT=1"], "unrecognized option '--HTTP_PORT'; did you mean '--http-port'?"),
        (
            ["serve", "-model-repository=x"],
            "unrecognized option '-model-repository'; did you mean '--model-repository'?",
        ),
        (["serve", "--model-repo=x"], "unrecognized option '--model-repo'; did you mean '--model-repository'?"),
        (["serve", "--port=8000"], "unrecognized option '--port'; did you mean '--http-port'?"),
        (["serve", "--xyzzy"], "unrecognized option '--xyzzy'; --help lists the valid ones"),
        (["serve", "--help_all"], "unrecognized option '--help_all'; did you mean '--help-all'?"),
        (["convert", "--batchsize", "1"], "unrecognized option '--batchsize'; did you mean '--batch-size'?"),
        (["--versoin"], "unrecognized option '--versoin'; did you mean '--version'?"),
        (
            ["--model-repository=x"],
            "unrecognized option '--model-repository'; it is an option of 'serve': conch serve --model-",
        ),
        (
            ["--quantize=int8"],
            "unrecognized option '--quantize'; it is an option of 'convert': conch convert --quantize …",
        ),
    ],
)
def test_what_is_mistyped_is_answered_with_what_was_meant(
    arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(answer)
    assert error.count("\n") == 1


def test_a_folder_in_place_of_a_command_is_to_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["models"]) == 1
    assert capsys.readouterr().err == "'models' is not a command; did you mean 'conch serve models'?\n"


def test_a_value_that_an_option_does_not_take_is_answered_with_those_that_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--model-control-mode=watch"]) == 1
    assert "'watch'; its values are none, poll, explicit" in capsys.readouterr().err


def test_a_checkpoint_served_as_a_repository_is_answered_with_the_command_that_serves_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "onnx").mkdir()
    command = [sys.executable, "-m", "conch", "serve", f"--model-repository={tmp_path}", "--http-port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"is a checkpoint, not a repository of models (serve it with 'conch serve {tmp_path}')" in done.stderr
