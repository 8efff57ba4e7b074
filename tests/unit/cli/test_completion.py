"""What a shell offers, asked for as a shell asks: through click's own completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from conch.cli import COMMANDS, conch


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two models, in the current directory's ``models``."""
    for path in ("greeter/1", "minilm/1", "minilm/configs"):
        (tmp_path / "models" / path).mkdir(parents=True)
    (tmp_path / "models" / "minilm" / "configs" / "large.pbtxt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def offered(line: str) -> list[str]:
    """What may stand in place of the line's last word; paths, which the shell finds, by their type."""
    *words, typed = line.split(" ")
    items = ShellComplete(conch, {}, "conch", "_CONCH_COMPLETE").get_completions(words, typed)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in items]


def test_commands_are_offered() -> None:
    assert offered("") == list(COMMANDS)
    assert offered("che") == ["check"]
    assert "--version" in offered("--v")


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("serve --model-control-mode ", ["none", "poll", "explicit", "on-demand"]),
        ("serve --log-format I", ["ISO8601"]),
        ("serve --allow-http ", ["true", "false"]),
        ("serve --strict-model-config f", ["false"]),
        ("serve --engine open", ["openvino"]),
        ("serve --task text-c", ["text-classification"]),
        ("serve --model-repository ", ["<dir>"]),
        ("serve --model-store ", ["<dir>"]),
        ("serve --log-file ", ["<file>"]),
        ("serve --grpc-server-cert ", ["<file>"]),
        ("serve --http-port ", []),
        ("serve --load-model m", ["minilm"]),
        ("serve --load-model ", ["*", "greeter", "minilm"]),
        ("serve --model-config-name ", ["large"]),
        ("check ", ["<dir>"]),
        ("deploy o", ["oci"]),
        ("deploy oci --endpoint gen", ["generate", "generate_stream"]),
        ("deploy oci --model-repository ", ["<dir>"]),
        ("check models --model-config-name l", ["large"]),
        ("request g", ["greeter"]),
        ("convert --layout ", ["huggingface", "triton"]),
        ("convert --quantize int4", ["int4", "int4-awq"]),
        ("convert --backend o", ["onnx", "openvino"]),
        ("convert --task fill", ["fill-mask"]),
        ("convert --html ", ["<file>"]),
    ],
)
def test_values_are_offered(line: str, values: list[str], repository: Path) -> None:
    assert offered(line) == values


@pytest.mark.parametrize("line", ["serve --model-repository {} --load-model gr", "request -r {} gr"])
def test_models_are_those_of_the_repository_on_the_line(
    line: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert offered(line.format(repository)) == ["greeter"]


@pytest.mark.parametrize("line", ["serve org/n", "convert --model org/n"])
def test_models_of_the_hubs_cache_are_offered_beside_files(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("models--org--name", "models--other--name", "datasets--org--name"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert offered(line) == ["org/name", "<file>"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shells_script_is_printed(shell: str) -> None:
    environment = {**os.environ, "_CONCH_COMPLETE": f"{shell}_source"}
    program = "import sys; from conch.cli import main; sys.argv = ['conch']; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "_CONCH_COMPLETE" in done.stdout, done.stderr
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True)


def test_completing_a_command_imports_none() -> None:
    program = (
        "import sys; from click.shell_completion import ShellComplete; from conch.cli import conch;"
        "print([item.value for item in ShellComplete(conch, {}, 'conch', 'X').get_completions([], 'd')]);"
        "print([name for name in sys.modules if name.startswith('conch.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, modules = done.stdout.splitlines()
    assert "doctor" in names
    assert modules == "['conch.cli.interrupting', 'conch.cli.suggest', 'conch.cli.lazy']"
