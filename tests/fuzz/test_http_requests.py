"""Random requests over HTTP: never 500, and never a member that is ignored in silence."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.fuzz.http_requests import ROUTES, Fuzzing, documented_members, start_server
from tests.servers import ConchServer

#: ``make fuzz-requests`` sends more.
REQUESTS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConchServer]:
    with start_server(tmp_path_factory.mktemp("requests")) as server:
        yield server


@pytest.mark.parametrize("name", ROUTES)
def test_every_request_is_answered_or_refused(server: ConchServer, name: str) -> None:
    fuzzing = Fuzzing(server, random.Random(7))
    for _ in range(REQUESTS):
        fuzzing.send_one(ROUTES[name])
    assert fuzzing.answered > REQUESTS // 20
    assert fuzzing.used - documented_members() == set()
