"""Stored responses belong to a client, also where servers with and without keys share a store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conch.frontends.http.dialects import OPENAI
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.responses import Responses
from conch.server.response_store import LocalResponseStore
from conch.wire.openai.responses.items import join_entry
from tests.unit.frontends.http.site import WrittenConnection


def test_no_id_of_a_client_without_a_name_is_that_of_a_client_with_one() -> None:
    store = LocalResponseStore(10_000, 60)
    store.put("ada/resp_1", join_entry(b'{"id": "resp_1"}', b"[]"))
    nothing: Any = None
    responses = Responses(SimpleNamespace(response_store=store), nothing, nothing)  # type: ignore[arg-type]

    def status(client: str, id: str) -> bytes:
        connection = WrittenConnection()
        exchange = HttpExchange(connection, b"GET", b"/v1/responses", {}, True)  # type: ignore[arg-type]
        exchange.client, exchange.dialect = client, OPENAI
        responses.retrieve(exchange, id)
        return connection.written.split(b" ")[1]

    assert status("ada", "resp_1") == b"200"
    assert status("", "ada/resp_1") == status("", "resp_1") == status("bob", "resp_1") == b"404"
    assert status("bob", "../ada/resp_1") == b"404"
