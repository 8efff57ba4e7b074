"""Models that do not load are refused with Triton's messages, and do not affect other models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.broken_models import BROKEN, OURS, RECORDED, Answer, lay_out, load_all
from tests.conformance.raw import Reply, get, post
from tests.conftest import Server, Start

EXPECTED: dict[str, Answer] = {
    name: (status, error) for name, (status, error) in json.loads(RECORDED.read_text()).items()
}


@pytest.fixture(scope="module")
def broken_repository(tmp_path_factory: pytest.TempPathFactory, server_kind: str) -> Path:
    return lay_out(tmp_path_factory.mktemp(f"broken_{server_kind}") / "models")


@pytest.fixture(scope="module")
def broken_server(broken_repository: Path, start: Start, logs: Path, server_kind: str) -> Iterator[Server]:
    with start(broken_repository, "--model-control-mode=explicit", log=logs / f"broken_{server_kind}.log") as server:
        yield server


@pytest.fixture(scope="module")
def answers(broken_server: Server, broken_repository: Path, server_kind: str) -> dict[str, Answer]:
    return load_all(broken_server.http, broken_repository, [name for name in EXPECTED if asked(name, server_kind)])


def asked(name: str, server_kind: str) -> bool:
    """Return whether to load a model; on Triton, only if it refuses the model without starting a process for it.

    Other models take more than a second each, and sometimes one of them hangs or crashes Triton.
    """
    return server_kind != "triton" or "failed to poll" in EXPECTED[name][1] or "instance group" in EXPECTED[name][1]


def test_every_broken_model_has_an_answer() -> None:
    assert set(EXPECTED) | set(OURS) == set(BROKEN)


@pytest.mark.parametrize("name", EXPECTED)
def test_load(name: str, answers: dict[str, Answer], server_kind: str) -> None:
    if not asked(name, server_kind):
        pytest.skip("recorded from Triton, not asked again")
    assert answers[name] == EXPECTED[name]


@pytest.mark.parametrize("name", OURS)
def test_load_that_triton_hangs_on(name: str, broken_server: Server, server_kind: str) -> None:
    if server_kind == "triton":
        pytest.skip("Triton waits for minutes when the model's file is missing")
    reply: Reply = post(broken_server.http, f"/v2/repository/models/{name}/load")
    assert reply.status in (400, 500)
    assert re.fullmatch(OURS[name], reply.error, re.DOTALL)


def test_other_models_still_load(answers: dict[str, Answer], broken_server: Server) -> None:
    assert get(broken_server.http, "/v2/health/live").status == 200
    assert post(broken_server.http, "/v2/repository/models/plus_one/load").status == 200
    assert get(broken_server.http, "/v2/models/plus_one/ready").status == 200


def test_failure_is_the_reason_in_the_index(answers: dict[str, Answer], broken_server: Server) -> None:
    post(broken_server.http, "/v2/repository/models/constructor_raises/load")
    entries = {entry["name"]: entry for entry in post(broken_server.http, "/v2/repository/index").json()}
    assert entries["constructor_raises"]["state"] == "UNAVAILABLE"
    assert entries["constructor_raises"]["reason"].startswith("Internal: ValueError: built wrongly\n\nAt:\n  ")
