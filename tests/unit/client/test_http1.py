"""HTTP/1.1 of a client, without a connection."""

from __future__ import annotations

import pytest

from conch.client.http1 import HttpFault, HttpResponse, ResponseReader, request_head
from conch.core.errors import Code, ConchError
from conch.http2 import frames

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Hint: a\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Trailer: a\r\n\r\n"


def read(*chunks: bytes) -> ResponseReader:
    reader = ResponseReader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader


@pytest.mark.parametrize("response", [OK, INTERIM + OK, CHUNKED], ids=["length", "interim", "chunked"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_response_is_read_in_any_pieces_and_another_one_follows(response: bytes, size: int) -> None:
    reader = ResponseReader()
    for _ in range(2):
        reader.begin()
        complete = [reader.feed(response[at : at + size]) for at in range(0, len(response), size)]
        assert complete == [False] * (len(complete) - 1) + [True]
        assert reader.keep_alive
        status, headers, body = reader.response()
        assert (status, body, b"x-hint" in headers) == (200, b"abc", False)


def test_a_body_is_taken_as_it_arrives() -> None:
    reader = read(OK[:-2])
    assert (reader.status, reader.take_body(), reader.complete) == (200, b"a", False)
    reader.feed(OK[-2:])
    assert (reader.take_body(), reader.complete) == (b"bc", True)


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        OK + b"HTT",
        OK + OK,
    ],
    ids=["close", "1.0", "surplus", "unrequested"],
)
def test_a_connection_that_ends_or_has_sent_too_much_is_not_used_again(response: bytes) -> None:
    reader = read(response)
    assert (reader.complete, reader.keep_alive, reader.take_body()) == (True, False, b"abc")


@pytest.mark.parametrize("more", [b"", b"Upgrade: h2c\r\nConnection: Upgrade\r\n"])
def test_a_change_of_the_protocol_is_the_response(more: bytes) -> None:
    reader = read(b"HTTP/1.1 101 Switching Protocols\r\n%s\r\n" % more)
    assert (reader.complete, reader.keep_alive, reader.status) == (True, False, 101)


def test_a_body_of_unknown_length_ends_with_the_connection() -> None:
    reader = read(b"HTTP/1.0 200 OK\r\n\r\nab", b"c")
    assert not reader.complete
    reader.end()
    assert (reader.complete, reader.keep_alive, reader.take_body()) == (True, False, b"abc")


@pytest.mark.parametrize("part", [b"", OK[:9], INTERIM, OK[:-1], CHUNKED[:-2]])
def test_a_connection_that_ends_early_is_a_fault(part: bytes) -> None:
    reader = read(*filter(None, [part]))
    with pytest.raises(HttpFault, match="the server closed the connection"):
        reader.end()


def test_another_protocol_is_a_fault() -> None:
    with pytest.raises(HttpFault, match="the response is not HTTP"):
        read(b"SMTP ready\r\n")
    with pytest.raises(HttpFault, match="the response is HTTP/2, so this is a gRPC port: use the HTTP port"):
        read(frames.settings({frames.MAX_CONCURRENT_STREAMS: 100}))


@pytest.mark.parametrize(("size", "expected"), [(b"3", 3), (b"three", None), (b"-3", None)])
def test_the_size_of_the_json_is_a_number(size: bytes, expected: int | None) -> None:
    assert HttpResponse(200, {b"inference-header-content-length": size}, b"").json_size == expected


def test_a_request_has_the_length_of_its_body() -> None:
    assert request_head("GET", "/v2", {"host": "a"}) == b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n"
    assert request_head("POST", "/v2", {}, 0) == b"POST /v2 HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("target", "headers"),
    [("/a b", {}), ("/ü", {}), ("/a\r\nb: c", {}), ("/", {"a": "b\r\nc: d"}), ("/", {"a": "€"}), ("/", {"a\n": "b"})],
)
def test_characters_that_a_head_cannot_have_are_refused(target: str, headers: dict[str, str]) -> None:
    with pytest.raises(ConchError) as caught:
        request_head("GET", target, headers)
    assert caught.value.code is Code.INVALID_ARG
