"""Requests in a known order form the same batches as in Triton, and the same requests are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.batches import HELD, PATTERNS, RECORDED, Outcome, lay_out, run
from tests.conftest import Start

EXPECTED = {name: Outcome(*told) for name, told in json.loads(RECORDED.read_text()).items()}


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, start: Start, logs: Path, server_kind: str
) -> dict[str, Outcome]:
    """Return the server's batches for all patterns, run concurrently."""
    if server_kind == "triton":
        pytest.skip("recorded from Triton, which takes half a minute for so many models; not asked again")
    repository = lay_out(tmp_path_factory.mktemp("batches") / "models")
    with start(repository, log=logs / "batches.log", env=HELD) as server:
        return run(server.grpc, list(PATTERNS))


def test_every_pattern_has_an_outcome() -> None:
    assert set(EXPECTED) == set(PATTERNS)


@pytest.mark.parametrize("name", EXPECTED)
def test_batches(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name] == EXPECTED[name]
