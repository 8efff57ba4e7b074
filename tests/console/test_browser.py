"""The console in Chromium; ``browser.mjs`` has the scenarios. ``make test-console`` runs these tests.

Screenshots of every page are written to ``build/console-screenshots``.
"""

from __future__ import annotations

import gzip
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from tests.console.models import add_chain, add_model
from tests.servers import ConchServer
from tests.unit.convert.report.test_document import MANIFEST

_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("browser.mjs")
_SCREENSHOTS = _ROOT / "build" / "console-screenshots"
_SECONDS = 170
#: Maximum size of all scripts, compressed (bytes).
_BUDGET = 250_000


def run(scenario: str, server: ConchServer) -> None:
    """Run a scenario; fails with everything that it found wrong."""
    _SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    command = ["node", str(_SCRIPT), scenario, f"http://{server.http}", str(_SCREENSHOTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("models")
    add_model(folder, "echo")
    MANIFEST.write(folder / "echo" / "1")
    add_model(folder, "other")
    add_chain(folder, "chain")
    with ConchServer(folder, "--model-control-mode=explicit", "--load-model=chain") as started:
        yield started


@pytest.mark.parametrize("scenario", ["pages", "keyboard", "control", "tensors", "stream", "files", "forms"])
def test_console(server: ConchServer, scenario: str) -> None:
    run(scenario, server)


def test_console_asks_for_a_key(tmp_path: Path) -> None:
    add_model(tmp_path, "echo")
    with ConchServer(tmp_path, env={"CONCH_API_KEY": "secret"}) as server:
        run("keys", server)


def test_console_has_a_page_for_each_model_of_a_shared_name(tmp_path: Path) -> None:
    for number, names in enumerate((["echo"], ["echo", "alone"]), 1):
        for name in names:
            add_model(tmp_path / str(number), name)
    config = tmp_path / "2" / "echo" / "config.pbtxt"
    config.write_text(config.read_text() + 'parameters { key: "of" value { string_value: "second" } }')
    with ConchServer(tmp_path / "1", "--model-namespacing=true", f"--model-repository={tmp_path / '2'}") as server:
        run("shared", server)


def test_console_shows_a_load_under_way(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", seconds=15)
    with ConchServer(tmp_path, wait=False) as server:
        run("loading", server)


def test_console_notices_that_a_server_disappears_and_returns(tmp_path: Path) -> None:
    add_model(tmp_path, "echo")
    server = ConchServer(tmp_path)
    command = ["node", str(_SCRIPT), "reconnect", f"http://{server.http}"]
    with server, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        assert page.stdout.readline() == "stop it\n"
        server.stop()
        assert page.stdout.readline() == "start it\n"
        with server:
            _, errors = page.communicate(timeout=_SECONDS)
        assert page.returncode == 0, errors


def test_console_lists_two_hundred_models(tmp_path: Path) -> None:
    add_model(tmp_path, "echo")
    for number in range(200):
        add_chain(tmp_path, f"chain_{number}")
    with ConchServer(tmp_path) as server:
        run("many", server)


def test_scripts_stay_within_their_budget() -> None:
    assets = files("conch.frontends.http.console").joinpath("static", "assets")
    scripts = [entry.read_bytes() for entry in assets.iterdir() if entry.name.endswith(".js")]
    assert 0 < sum(len(gzip.compress(script)) for script in scripts) < _BUDGET
