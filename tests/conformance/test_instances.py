"""Instances added and removed while requests run: how often the model is initialized and finalized."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.conformance.raw import Reply, get, post, tensor
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import write

#: Writes a line for each call of initialize and finalize.
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.note("initialize")

    def execute(self, requests):
        given = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)]) for values in given]

    def finalize(self):
        self.note("finalize")

    def note(self, what):
        with open(NOTES, "a") as notes:
            notes.write(what + chr(10))
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
#: Flags of the server, and the rate limiter settings of each group.
MODES = {
    "unlimited": ([], ""),
    "limited": (["--rate-limit=execution_count"], 'resources [ { name: "R" count: 2 } ]'),
}


def groups(*texts: str) -> str:
    """Return instance groups, given by kind, count and optional name."""
    written = []
    for text in texts:
        kind, count, *name = text.split()
        named = f'name: "{name[0]}"' if name else ""
        written.append(f"{{ kind: KIND_{kind} count: {count} {named} rate_limiter {{ LIMITS }} }}")
    return f"instance_group [ {', '.join(written)} ]"


#: By event: the groups of each load, and how often initialize and finalize have been called when it returns.
CHANGES: dict[str, list[tuple[str, int, int]]] = {
    "add, remove, add": [
        (groups("CPU 3"), 3, 0), (groups("CPU 4"), 4, 0), (groups("CPU 3"), 4, 1), (groups("CPU 4"), 5, 1),
    ],
    "remove several": [
        (groups("CPU 5"), 5, 0), (groups("CPU 3"), 5, 2), (groups("CPU 1"), 5, 4), (groups("CPU 3"), 7, 4),
    ],
    "count 0 is 1": [(groups("CPU 1"), 1, 0), (groups("CPU 0"), 1, 0)],
    "two kinds": [
        (groups("CPU 2", "MODEL 1"), 3, 0), (groups("CPU 1", "MODEL 3"), 5, 1), (groups("MODEL 3", "CPU 1"), 5, 1),
        (groups("MODEL 2", "CPU 2"), 6, 2),
    ],
    "rename": [(groups("CPU 1 old", "MODEL 2 older"), 3, 0), (groups("CPU 1 new", "MODEL 2 newer"), 3, 0)],
    "exchange names": [(groups("CPU 1 a", "MODEL 1 b"), 2, 0), (groups("MODEL 2 a", "CPU 1 b"), 3, 0)],
    "regroup": [
        (groups("MODEL 2", "CPU 3"), 5, 0), (groups("CPU 1 a", "CPU 2 b", "MODEL 1 c", "MODEL 1 d"), 5, 0),
        (groups("CPU 3 e", "MODEL 2 f"), 5, 0),
    ],
    "a wrong configuration": [(groups("CPU 3"), 3, 0), ("--- wrong ---", 3, 0), (groups("CPU 1"), 3, 2)],
}  # fmt: skip
RESOURCES = [(2, 1, 0), (4, 2, 1), (3, 3, 2), (3, 3, 2)]


class Watched:
    """The model ``m`` of a server, and the calls of its instances."""

    def __init__(self, server: Server, repository: Path, notes: Path, limits: str) -> None:
        self.server = server
        self.repository = repository
        self.notes = notes
        self.limits = limits

    def write(self, instances: str) -> None:
        text = CONFIG + instances.replace(
            "rate_limiter { LIMITS }", self.limits and f"rate_limiter {{ {self.limits} }}"
        )
        # Python cannot write byte code here, which Triton would regard as a change of the version.
        files = {"1/model.py": f"NOTES = {str(self.notes)!r}\n{MODEL}", "1/__pycache__": ""}
        write(self.repository, "m", text, {} if (self.repository / "m").exists() else files)

    def load(self, config: dict[str, Any] | None = None) -> Reply:
        body = {"parameters": {"config": json.dumps(config)}} if config is not None else {}
        return post(self.server.http, "/v2/repository/models/m/load", body)

    def unload(self) -> None:
        post(self.server.http, "/v2/repository/models/m/unload", {})
        eventually(lambda: len(set(self.calls())) == 1, "the end of all instances")

    def calls(self) -> tuple[int, int]:
        counts = Counter(self.notes.read_text().split())
        return counts["initialize"], counts["finalize"]

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(get(self.server.http, "/v2/models/m/config").body)
        return config

    def ask(self) -> int:
        body = {"inputs": [tensor("X", "INT32", [1], [1])]}
        return post(self.server.http, "/v2/models/m/infer", body).status


@pytest.fixture(scope="module", params=MODES)
def limited(
    request: pytest.FixtureRequest, start: Start, server_kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path, str, Path]]:
    folder = tmp_path_factory.mktemp(f"instances_{server_kind}")
    (folder / "models").mkdir()
    flags, limits = MODES[request.param]
    explicit = ("--model-control-mode=explicit", "--log-verbose=1")
    with start(folder / "models", *explicit, *flags, log=folder / "log") as server:
        yield server, folder / "models", limits, folder / "log"


@pytest.fixture
def watched(limited: tuple[Server, Path, str, Path], tmp_path: Path) -> Iterator[Watched]:
    server, repository, limits, _ = limited
    (tmp_path / "notes").touch()
    model = Watched(server, repository, tmp_path / "notes", limits)
    yield model
    model.unload()
    for path in sorted((repository / "m").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (repository / "m").rmdir()


@pytest.fixture
def busy(watched: Watched, background: Callable[..., Future[None]]) -> Iterator[Callable[[], None]]:
    """Sends requests one after another until the end of the test; all of them must succeed."""
    ended, clients = Event(), []

    def keep_asking() -> None:
        while not ended.is_set():
            assert watched.ask() == 200

    yield lambda: clients.extend(background(keep_asking) for _ in range(3))
    ended.set()
    for client in clients:
        client.result()


@pytest.mark.parametrize("change", CHANGES)
def test_instances_that_stay_run_on_while_others_come_and_go(
    change: str, watched: Watched, busy: Callable[[], None]
) -> None:
    for index, (instances, *expected) in enumerate(CHANGES[change]):
        watched.write(instances)
        assert watched.load().status == (200 if instances.startswith("instance_group") else 500)
        assert watched.calls() == tuple(expected)
        if not index:
            busy()


def test_configuration_of_a_load_changes_instances_as_the_file_does(watched: Watched, busy: Callable[[], None]) -> None:
    watched.write(groups("CPU 1"))
    assert watched.load().status == 200
    busy()
    config = watched.config()
    for count, expected in ((3, (3, 0)), (1, (3, 2)), (1, (3, 2)), (2, (4, 2))):
        config["instance_group"][0]["count"] = count
        assert watched.load(config).status == 200
        assert watched.calls() == expected
        assert watched.config()["instance_group"][0]["count"] == count
    watched.write(groups("CPU 3"))
    assert watched.load().status == 200
    assert watched.calls() == (5, 2)


def test_configuration_of_a_load_that_changes_more_restarts_all(watched: Watched) -> None:
    watched.write(groups("CPU 1"))
    assert watched.load().status == 200
    config = watched.config()
    config["instance_group"][0]["count"] = 2
    config["parameters"] = {"a": {"string_value": "b"}}
    assert watched.load(config).status == 200
    eventually(lambda: watched.calls() == (3, 1), "the end of the first instance")


def test_resources_of_an_instance_are_logged_as_they_change(
    limited: tuple[Server, Path, str, Path], watched: Watched
) -> None:
    _, _, limits, log = limited
    before = len(log.read_text(errors="replace"))
    for count, *expected in RESOURCES:
        watched.limits = f'resources [ {{ name: "R" count: {count} }} ]'
        watched.write(groups("CPU 1"))
        assert watched.load().status == 200
        assert watched.calls() == tuple(expected)
        assert watched.ask() == 200
    told = log.read_text(errors="replace")[before:]
    maps = [line.split('] "', 1)[1] for line in told.splitlines() if "Max Resource Map" in line]
    counts = [2, 4, 3] if limits else []
    head = r"\nMax Resource Map===>\n\tDevice: 0\n\t\tResource: R\t Count: "
    assert {f'{head}{count}\\n"' for count in counts} <= set(maps)
