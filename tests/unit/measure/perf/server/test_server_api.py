"""Reading the server's metadata for a measurement."""

from __future__ import annotations

import pytest

from conch.core.errors import Code, ConchError
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.server.api import ServerApi
from tests.unit.measure.perf.known_server import KnownServer, running


def test_a_proxy_in_the_environment_is_not_asked_for_a_server_that_is_measured_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no listener

    with running(KnownServer()) as server, ServerApi(Address("127.0.0.1", server.port), grpc=False) as api:
        assert api.server() == {"name": "known"}


def test_extensions_that_a_server_lacks_are_empty() -> None:
    with running(KnownServer()) as server, ServerApi(Address("127.0.0.1", server.port), grpc=False) as api:
        assert (api.config("other", ""), api.statistics()) == ({}, [])
        with pytest.raises(ConchError, match="not here") as caught:
            api.metadata("other", "")
        assert caught.value.code is Code.NOT_FOUND
