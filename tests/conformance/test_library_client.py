"""``conch.Client`` works with the real Triton as it does with conch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import conch
from conch import Code, ConchError
from tests.conftest import Server

ROWS = {"INPUT0": list(range(16)), "INPUT1": np.ones(16, np.int32)}


@pytest.fixture(params=["grpc", "http"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[conch.Client]:
    url = server.grpc if request.param == "grpc" else f"http://{server.http}"
    with conch.Client(url) as client:
        yield client


def test_server_and_models_are_described(client: conch.Client) -> None:
    assert client.live()
    assert client.ready("add_sub") and not client.ready("nobody")
    assert client.metadata()["version"] == "2.51.0"
    assert client.metadata("add_sub")["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": [16]}
    assert client.config("identity_batched")["max_batch_size"] == 8
    assert client.statistics("add_sub")[0]["name"] == "add_sub"
    assert {"name": "add_sub", "version": "1", "state": "READY"} in client.models()


def test_requests_are_answered(client: conch.Client) -> None:
    result = client.infer("add_sub", ROWS, request_id="seven", outputs=["OUTPUT0"])
    assert (result.id, result.model_version, list(result.outputs)) == ("seven", "1", ["OUTPUT0"])
    assert result["OUTPUT0"].tolist() == list(range(1, 17))
    result = client.infer("types", {"IN_BYTES": ["ä", b"\xff"], "IN_BF16": [1.5], "IN_FP16": [0.5]})
    assert result["OUT_BYTES"].tolist() == ["ä".encode(), b"\xff"]
    assert (result["OUT_BF16"].tolist(), result["OUT_FP16"].tolist()) == ([1.5], [0.5])
    assert client.infer("identity_batched", {"INPUT": [[1, 2], [3, 4]]})["OUTPUT"].shape == (2, 2)


def test_streams_are_read(client: conch.Client) -> None:
    assert [infer_event["OUT"].tolist() for infer_event in client.infer_stream("repeat", {"IN": [4, 5]})] == [[4], [5]]
    assert [generate_event.texts("TEXT") for generate_event in client.generate_stream("generate", "so", times=2)] == [
        ["so"],
        ["so"],
    ]
    assert client.generate("generate", "once").texts("TEXT") == ["once"]


def test_refusals_have_their_codes(client: conch.Client) -> None:
    for call, code in (
        (lambda: client.infer("nobody", {}), Code.NOT_FOUND),
        (lambda: client.infer("add_sub", {"INPUT0": range(16)}), Code.INVALID_ARG),
        (lambda: list(client.infer_stream("repeat", {"IN": [1], "DELAY": [2000]}, timeout=0.3)), Code.UNAVAILABLE),
        (lambda: client.load("add_sub"), Code.UNAVAILABLE),
    ):
        with pytest.raises(ConchError) as raised:
            call()
        assert raised.value.code is code


def test_a_stream_that_is_refused_says_why(server: Server, server_kind: str) -> None:
    with conch.Client(server.grpc) as client:
        with pytest.raises(ConchError, match="correlation ID") as raised:
            list(client.infer_stream("accumulate", {"INPUT": [[1]]}))
    assert raised.value.code is (Code.INVALID_ARG if server_kind == "conch" else Code.UNKNOWN)


def test_a_model_may_continue_after_an_error(server: Server, server_kind: str) -> None:
    """With error codes, or with cancellation at that moment, Triton crashes after some dozens of streams."""
    with conch.Client(server.grpc) as client:
        for _ in range(100):
            with pytest.raises(ConchError, match="negative") as raised:
                list(client.infer_stream("repeat", {"IN": [1, -1, 3, 4]}))
            assert raised.value.code is (Code.INVALID_ARG if server_kind == "conch" else Code.UNKNOWN)
        assert client.live()
