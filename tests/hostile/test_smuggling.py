"""HTTP requests with an ambiguous end: none gets a second response, and the server continues.

Each is followed by a request for a model's metadata, at the position where a proxy with another interpretation of the
first request's end would send it. The table has the responses of conch and of the real Triton; conch closes the
connection after each refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.conformance.raw import get
from tests.conftest import Start
from tests.hostile.raw_http import Exchange, exchange
from tests.models import build

_HIDDEN: Final = b"GET /v2/models/add_sub HTTP/1.1\r\nHost: localhost\r\n\r\n"
_END: Final = b"0\r\n\r\n"
_INDEX: Final = b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n"
#: Time without data (s) after which no more responses are expected; all exchanges run at once.
_PATIENCE: Final = 2.0


class Case(NamedTuple):
    """The bytes to send, and the statuses of all responses of conch and of the real Triton."""

    sent: bytes
    conch: tuple[int, ...] = (400,)
    triton: tuple[int, ...] = ()


def _post(*headers: str, body: bytes = b"{}") -> bytes:
    return _INDEX + "".join(f"{header}\r\n" for header in headers).encode() + b"\r\n" + body + _HIDDEN


def _chunks(body: bytes, end: bytes = _END + _HIDDEN) -> bytes:
    return _INDEX + b"Transfer-Encoding: chunked\r\n\r\n" + body + end


def _line(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([line, b"Host: localhost", *headers, b"", body])


#: The real Triton responds to the first request and drops the bytes after it.
_IGNORED: Final = (200,)

CASES: Final[Mapping[str, Case]] = {
    # Lengths and chunks
    "length and chunks": Case(_post("Content-Length: 60", "Transfer-Encoding: chunked", body=_END), triton=_IGNORED),
    "chunks and length": Case(_post("Transfer-Encoding: chunked", "Content-Length: 5", body=_END), triton=_IGNORED),
    "xchunked": Case(_post("Content-Length: 5", "Transfer-Encoding: xchunked", body=_END), triton=_IGNORED),
    "identity": Case(_post("Transfer-Encoding: identity", "Content-Length: 2"), triton=_IGNORED),
    "chunked, identity": Case(_post("Transfer-Encoding: chunked, identity", body=_END), triton=_IGNORED),
    "chunked twice": Case(_post("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=_END),
                          triton=_IGNORED),
    "chunked, then identity": Case(_post("Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=_END),
                                   triton=_IGNORED),
    "chunked behind a tab": Case(_post("Content-Length: 5", "Transfer-Encoding:\tchunked", body=_END),
                                 triton=_IGNORED),
    "chunked behind a vertical tab": Case(_post("Content-Length: 5", "Transfer-Encoding: \vchunked", body=_END),
                                          triton=_IGNORED),
    "space before the colon": Case(_post("Content-Length: 5", "Transfer-Encoding : chunked", body=_END),
                                   triton=_IGNORED),
    "quoted": Case(_post("Content-Length: 5", 'Transfer-Encoding: "chunked"', body=_END), triton=_IGNORED),
    "folded coding": Case(_post("Content-Length: 5", "Transfer-Encoding:\r\n chunked", body=_END)),
    "chunks in HTTP/1.0": Case(_post("Transfer-Encoding: chunked", body=_END).replace(b"/1.1", b"/1.0", 1),
                               conch=_IGNORED, triton=_IGNORED),
    "compressed chunks": Case(_post("Transfer-Encoding: gzip, chunked", body=_END), conch=(501,), triton=_IGNORED),
    "folded length": Case(_post("Content-Length: 0", "X: a\r\n Content-Length: 30", body=b""), triton=_IGNORED),
    "folded first line": Case(_INDEX.replace(b"Host", b" Content-Length: 5\r\nHost") + b"\r\n" + _HIDDEN,
                              triton=_IGNORED),
    "NUL in a name": Case(_post("Content-Length: 2", "X\0Y: a"), triton=_IGNORED),
    "NUL in a value": Case(_post("Content-Length: 2", "X: a\0b"), triton=_IGNORED),
    # Lengths
    "two lengths": Case(_post("Content-Length: 2", f"Content-Length: {2 + len(_HIDDEN)}"), triton=(500,)),
    "the same length twice": Case(_post("Content-Length: 2", "Content-Length: 2"), triton=_IGNORED),
    "no length": Case(_post("Content-Length:"), triton=_IGNORED),
    "length with a space": Case(_post("Content-Length : 2"), triton=_IGNORED),
    **{f"length {value!r}": Case(_post(f"Content-Length: {value}"))
       for value in ("+2", "-1", "0x2", "2.0", "2e0", "0_2", "2 2", "2, 2", "18446744073709551618", "\u0662")},
    # Ends of lines
    "LF in the head": Case(_post("Content-Length: 2").replace(b"\r\n", b"\n")),
    "LF before a length": Case(_post("X: y\nContent-Length: 2")),
    "CR before a length": Case(_post("X: y\rContent-Length: 2")),
    "two CR before a length": Case(_post("X: y\r\rContent-Length: 2")),
    # Chunks
    **{f"chunk of {size!r} bytes": Case(_chunks(size.encode() + b"\r\n{}\r\n"))
       for size in ("+2", "-2", "0x2", "0_2", " 2", "2 ", "")},
    "chunk of 2^64 + 2 bytes": Case(_chunks(b"10000000000000002\r\n{}\r\n"), triton=_IGNORED),
    "chunk that is longer than it says": Case(_chunks(b"2\r\n{}XX\r\n")),
    "chunks with LF": Case(_chunks(b"2\n{}\n", b"0\n\n" + _HIDDEN)),
    "chunk before LF": Case(_chunks(b"2\r\n{}\n")),
    "chunk before CR": Case(_chunks(b"2\r\n{}\rX")),
    "extension": Case(_chunks(b"2;a=b\r\n{}\r\n", _END), conch=(200,)),
    "extension with LF": Case(_chunks(b"2;a\n{}\r\n")),
    "extension with CR": Case(_chunks(b"2;a\rb\r\n{}\r\n")),
    "extension with an open quote": Case(_chunks(b'2;a="\r\n{}\r\n')),
    "length in a trailer": Case(_chunks(b"2\r\n{}\r\n", b"0\r\nContent-Length: 60\r\n\r\n" + _HIDDEN),
                                triton=_IGNORED),
    "coding in a trailer": Case(_chunks(b"2\r\n{}\r\n", b"0\r\nTransfer-Encoding: chunked\r\n\r\n" + _HIDDEN),
                                triton=_IGNORED),
    "trailer without a colon": Case(_chunks(b"2\r\n{}\r\n", b"0\r\nx\r\n\r\n" + _HIDDEN), triton=_IGNORED),
    # First lines
    "absolute target": Case(_line(b"GET http://other.example/v2/models/add_sub HTTP/1.1"),
                            conch=(200,), triton=(200,)),
    "CONNECT": Case(_line(b"CONNECT localhost:80 HTTP/1.1", body=_HIDDEN), triton=(404,)),
    "authority as a target": Case(_line(b"GET localhost:80 HTTP/1.1", body=_HIDDEN)),
    "OPTIONS *": Case(_line(b"OPTIONS * HTTP/1.1"), conch=(404,)),
    "HTTP/0.9": Case(b"GET /v2/models/add_sub\r\n\r\n", conch=(505,)),
    "HTTP/2.0": Case(_line(b"GET /v2/models/add_sub HTTP/2.0", body=_HIDDEN), conch=(505,), triton=(200,)),
    "HTTP/1.2": Case(_line(b"GET /v2/models/add_sub HTTP/1.2", body=_HIDDEN), triton=(200,)),
    "http/1.1": Case(_line(b"GET /v2/models/add_sub http/1.1", body=_HIDDEN)),
    "preface of HTTP/2": Case(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + _HIDDEN),
    "TLS": Case(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)),
    "tabs in the line": Case(_line(b"GET\t/v2/models/add_sub\tHTTP/1.1", body=_HIDDEN)),
    "two versions": Case(_line(b"GET /v2/health/live HTTP/1.1 /v2/models/add_sub HTTP/1.1", body=_HIDDEN)),
    "CR in the target": Case(_line(b"GET /v2/health\r/live HTTP/1.1", body=_HIDDEN)),
    "two hosts": Case(_line(b"GET /v2/health/live HTTP/1.1", b"Host: elsewhere", body=_HIDDEN), triton=_IGNORED),
    # Bodies that are requests
    "body of a GET": Case(_line(b"GET /v2/health/live HTTP/1.1", b"Content-Length: %d" % len(_HIDDEN), body=_HIDDEN),
                          conch=(200,), triton=(200,)),
    "body that is waited for": Case(_line(_INDEX.split(b"\r\n")[0], b"Content-Length: %d" % len(_HIDDEN),
                                          b"Expect: 100-continue", body=_HIDDEN), conch=(100, 500), triton=(100, 500)),
    "body of an upgrade": Case(_line(b"GET /v2/health/live HTTP/1.1", b"Connection: Upgrade, HTTP2-Settings",
                                     b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__",
                                     b"Content-Length: %d" % len(_HIDDEN), body=_HIDDEN), conch=(200,), triton=(200,)),
    "headers that name another request": Case(_line(b"GET /v2/health/live HTTP/1.1",
                                                    b"X-Original-URL: /v2/models/add_sub",
                                                    b"X-HTTP-Method-Override: POST"), conch=(200,), triton=(200,)),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(server_kind: str, start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exchange]:
    """Return the results of all cases, sent at once; the server responds to other requests afterwards."""
    folder: Path = tmp_path_factory.mktemp("smuggling")
    repository = build(folder / "models", "add_sub")
    with start(repository, log=folder / f"{server_kind}.log") as server, ThreadPoolExecutor(len(CASES)) as pool:
        exchanges = pool.map(lambda case: exchange(server.http, case.sent, _PATIENCE), CASES.values())
        found = dict(zip(CASES, exchanges, strict=True))
        assert get(server.http, "/v2/models/add_sub").status == 200
    return found


@pytest.mark.parametrize("name", CASES)
def test_hidden_request_is_not_answered(server_kind: str, outcomes: dict[str, Exchange], name: str) -> None:
    outcome, case = outcomes[name], CASES[name]
    assert outcome.statuses == (case.conch if server_kind == "conch" else case.triton), outcome
    if server_kind == "conch" and outcome.statuses[-1] == 400:
        assert outcome.closed
