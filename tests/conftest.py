"""The servers under test: conch, and the real Triton where it can be had.

``--server=conch|triton|both`` (or the environment variable ``CONFORMANCE_SERVER``) says which of
them the parametrised fixtures run; both by default.
"""

from __future__ import annotations

import gc
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.events import TIMEOUT, eventually
from tests.models import build
from tests.oracle import OracleUnavailable, TritonServer, install
from tests.servers import ConchServer

# Two parts of the tests run at a time, so both cores are busy, and threads that compute one tiny tensor together would
# mostly wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

Server = ConchServer | TritonServer
Start = Callable[..., Server]


def pytest_addoption(parser: pytest.Parser) -> None:
    default = os.environ.get("CONFORMANCE_SERVER", "both")
    parser.addoption("--server", choices=["conch", "triton", "both"], default=default, help="servers to run against")
    parser.addoption("--core", action="store_true", help="leave out unit tests that take long or need other extras")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server_kind" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("server")
        kinds = [kind for kind in ("conch", "triton") if chosen in (kind, "both")]
        metafunc.parametrize("server_kind", kinds, scope="session")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what starts the real Triton with models or flags of its own, unless ``--server=triton`` asks for it.

    It takes seconds for each start, and responds as it did when the test was written, because its version is fixed.
    """
    if config.getoption("server") == "triton":
        return
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        own_server = "start" in getattr(item, "fixturenames", ()) and "start" not in parameters
        if own_server and parameters.get("server_kind") == "triton":
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def nothing_older_is_collected() -> None:
    """Keep the garbage collector to what the tests of a module make.

    Beside torch and all that other tests have imported, each of its rounds takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy repository; nothing may change it."""
    return build(tmp_path_factory.mktemp("repository") / "models")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the servers' logs."""
    return tmp_path_factory.mktemp("logs")


def _start_conch(*arguments: object, **options: object) -> ConchServer:
    return ConchServer(*arguments, **options)  # type: ignore[arg-type]


def _start_triton(*arguments: object, **options: object) -> TritonServer:
    try:
        return TritonServer(*arguments, oracle=install(), **options)  # type: ignore[arg-type]
    except OracleUnavailable as error:
        pytest.skip(f"the real Triton is not available here: {error}")


STARTERS: dict[str, Start] = {"conch": _start_conch, "triton": _start_triton}


#: One model that does not load must not keep the tests of all others from running.
TOLERANT = ("--exit-on-error=false", "--strict-readiness=false")


def wait_until_loaded(server: Server) -> None:
    """Return when no model is loading any more."""

    def loaded() -> bool:
        index = urllib.request.Request(f"http://{server.http}/v2/repository/index", method="POST")
        with urllib.request.urlopen(index, timeout=TIMEOUT) as reply:
            return not any(entry.get("state") in (None, "LOADING") for entry in json.load(reply))

    eventually(loaded, "loading the toy repository", 120)


@pytest.fixture(scope="session")
def conch(repository: Path, logs: Path) -> Iterator[Server]:
    """conch over the toy repository, for the whole session; some of its models need what conch does not have yet."""
    with _start_conch(
        repository, "--exit-on-error=false", "--strict-readiness=false", log=logs / "conch.log"
    ) as server:
        yield server


@pytest.fixture(scope="session")
def triton(repository: Path, logs: Path) -> Iterator[Server]:
    """The real Triton over the toy repository, for the whole session."""
    with _start_triton(repository, *TOLERANT, log=logs / "triton.log") as server:
        wait_until_loaded(server)
        yield server


@pytest.fixture(scope="session")
def server(server_kind: str, request: pytest.FixtureRequest) -> Server:
    """Each of the two servers over the toy repository."""
    server: Server = request.getfixturevalue(server_kind)
    return server


@pytest.fixture(scope="session")
def start(server_kind: str) -> Start:
    """Starts a server of the kind under test over another repository: ``with start(path, *flags) as server``."""
    return STARTERS[server_kind]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opened, in reverse order."""
    with ExitStack() as stack:
        yield stack
