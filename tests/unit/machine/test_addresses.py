from __future__ import annotations

import pytest

from conch.machine.ports import host_and_port


@pytest.mark.parametrize(
    ("host", "shown"), [("localhost", "localhost:80"), ("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80")]
)
def test_an_address_has_brackets_where_its_host_has_colons(host: str, shown: str) -> None:
    assert host_and_port(host, 80) == shown
