"""``conch init``: every template passes check and its test, is served, and answers the request that is named."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conch.cli.init import TEMPLATES
from tests.conformance.raw import post
from tests.servers import ConchServer
from tests.text_checkpoints import write

CONCH = (sys.executable, "-m", "conch")
#: What the answer to the request of each template has in it; the checkpoints have random weights.
ANSWERS = {
    "python": '"greeting":"Hello, Ada!"',
    "embedding": '"embedding":[',
    "classifier": '"label":[',
    "ensemble": '"count":3',
    "decoupled": '"word":"three"',
    "bls": '"verdict":"short"',
}
#: Its path, and the next commands that were named for the model of each template.
Repository = tuple[Path, dict[str, list[str]]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A repository with a model of each template, and the commands that are to be next."""
    folder = tmp_path_factory.mktemp("init")
    checkpoints = {
        "embedding": write(folder / "encoder", "AutoModel"),
        "classifier": write(folder / "labels", "AutoModelForSequenceClassification"),
    }
    commands = {}
    for template in TEMPLATES:
        model = ["--model", str(checkpoints[template])] if template in checkpoints else []
        command = [*CONCH, "init", f"my-{template}", "--template", template, *model]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        commands[template] = re.findall(r"^  (.+)$", ended.stdout, re.MULTILINE)
    return folder / "models", commands


def test_every_template_has_the_same_next_commands(repository: Repository) -> None:
    _, commands = repository
    for template, lines in commands.items():
        check, test, serve, ask = map(shlex.split, lines)
        assert (check, test) == (["conch", "check", "models"], ["pytest", f"models/my-{template}"])
        assert serve == ["conch", "serve", "--model-repository=models"]
        assert ask[0] == "curl"


def test_they_pass_the_check(repository: Repository) -> None:
    folder, _ = repository
    ended = subprocess.run([*CONCH, "check", "models"], cwd=folder.parent, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "0 error(s), 0 warning(s)\n")


def test_their_tests_pass(repository: Repository) -> None:
    folder, _ = repository
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conch.pytest_plugin", "models"]
    ended = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "15 passed" in ended.stdout


@pytest.fixture(scope="module")
def server(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    log = tmp_path_factory.mktemp("log") / "log"
    with ConchServer(repository[0], log=log) as server:
        yield server
    assert "ignore version directory" not in log.read_text()


@pytest.mark.parametrize("template", TEMPLATES)
def test_they_answer_the_request_that_is_named(server: ConchServer, repository: Repository, template: str) -> None:
    *_, url, flag, body = shlex.split(repository[1][template][-1])
    assert flag == "-d"
    reply = post(server.http, url.removeprefix("localhost:8000"), json.loads(body))
    assert reply.status == 200, reply.body
    assert ANSWERS[template] in reply.body.decode()
