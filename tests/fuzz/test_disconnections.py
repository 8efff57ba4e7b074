"""Clients disconnect from a server with models of all kinds, and nothing is left of their requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.disconnections.__main__ import MODES, run


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_of_requests_whose_clients_disconnect(tmp_path: Path, mode: str) -> None:
    """``make fuzz-disconnections`` does this for longer, and with other seeds."""
    assert run(tmp_path, mode, seed=1, seconds=20, count=8) == []
