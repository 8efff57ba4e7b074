"""Slow clients: each is disconnected after its time limit, and counted.

The real Triton has no such limits except gRPC's keepalive, so there is nothing to compare with. The limit for unread
responses is covered by unit tests only: sockets buffer so much data that a test would take minutes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import pytest

from conch.http2 import frames
from tests.conformance.raw import get
from tests.conftest import STARTERS, Server
from tests.events import eventually
from tests.hostile.raw_http import connect, exchange
from tests.models import build

_FLAGS: Final = ("--head-timeout-secs=3", "--body-timeout-secs=3", "--idle-timeout-secs=4")
#: Far longer (s) than any of the limits, for machines that do other work too.
_PATIENCE: Final = 30.0
_HEAD: Final = b"POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
_FORM: Final = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n1000\r\n--b\r\n"
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
)
_LIVE: Final = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
_GREETING: Final = frames.PREFACE + frames.settings({})


class Slow(NamedTuple):
    """A client that sends ``first``, and then one byte of ``drips`` ten times a second until it is disconnected.

    ``says`` is the server's message, ``reason`` the label of ``conch_closed_connections`` that counts the client.
    """

    first: bytes
    reason: str
    says: bytes = b""
    drips: bytes = b""
    grpc: bool = False


SLOW: Final[Mapping[str, Slow]] = {
    "silent": Slow(b"", "head"),
    "half a head": Slow(_HEAD[:40], "head", b"--head-timeout-secs"),
    "dripping head": Slow(_HEAD[:40], "head", b"--head-timeout-secs", b"x" * 1000),
    "dripping line": Slow(b"", "head", b"--head-timeout-secs", b"GET /" + b"x" * 1000),
    "half a body": Slow(_HEAD + b"{", "body", b"--body-timeout-secs"),
    "dripping body": Slow(_HEAD, "body", b"--body-timeout-secs", b"x" * 99),
    "half a chunk": Slow(_HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked") + b"5\r\nab", "body",
                         b"--body-timeout-secs"),
    "endless extension": Slow(_HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked") + b"5;", "body",
                              b"--body-timeout-secs", b"x" * 1000),
    "dripping recording": Slow(_FORM, "body", b"--body-timeout-secs", b"x" * 1000),
    "idle": Slow(_LIVE, "idle", b"200"),
    "silent gRPC": Slow(b"", "head", grpc=True),
    "half a preface": Slow(frames.PREFACE[:10], "head", grpc=True),
    "preface alone": Slow(frames.PREFACE, "head", grpc=True),
    "dripping frame": Slow(_GREETING + frames.FRAME.pack(8 << 8, 0, 0)[:5], "head", drips=bytes(3), grpc=True),
    "head without its end": Slow(_GREETING + frames.frame(frames.HEADERS, 0, 1, b"\x83"), "head", grpc=True),
    "idle gRPC": Slow(_GREETING, "idle", grpc=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("slow")
    with STARTERS["conch"](build(folder / "models", "add_sub"), *_FLAGS, log=folder / "server.log") as server:
        yield server


def _told(server: Server, slow: Slow) -> bytes | None:
    """Return the data that a client receives until it is disconnected; None if it may stay."""
    told, until = b"", monotonic() + _PATIENCE
    with connect(server.grpc if slow.grpc else server.http, 0.1) as connection:
        drips = iter([bytes([byte]) for byte in slow.drips])
        try:
            connection.sendall(slow.first)
            while monotonic() < until:
                try:
                    if not (part := connection.recv(4096)):
                        return told
                    told += part
                except TimeoutError:
                    connection.sendall(next(drips, b""))
        except ConnectionError:
            return told
    return None


def _closed(server: Server) -> dict[tuple[str, str], int]:
    """Return the number of closed connections by protocol and reason."""
    text = get(server.metrics, "/metrics").body.decode()
    found = re.findall(r'^conch_closed_connections\{protocol="(\w+)",reason="(\w+)"\} (\d+)', text, re.MULTILINE)
    return {(protocol, reason): int(count) for protocol, reason, count in found}


def test_slow_clients_are_sent_away_and_counted(server: Server) -> None:
    with ThreadPoolExecutor(len(SLOW)) as pool:
        told = dict(zip(SLOW, pool.map(lambda slow: _told(server, slow), SLOW.values()), strict=True))
    assert [name for name, text in told.items() if text is None] == []
    assert {name: text for name, text in told.items() if SLOW[name].says not in (text or b"")} == {}
    assert _closed(server) == Counter(("grpc" if slow.grpc else "http", slow.reason) for slow in SLOW.values())
    assert get(server.http, "/v2/models/add_sub").status == 200


def test_connections_beyond_the_cap_are_answered_for_health_alone(tmp_path: Path, stack: ExitStack) -> None:
    (tmp_path / "models").mkdir()
    server = stack.enter_context(STARTERS["conch"](tmp_path / "models", "--max-connections=4"))
    with ExitStack() as taken:
        for _ in range(4):
            connection = taken.enter_context(connect(server.http))
            connection.sendall(_LIVE)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        refused = exchange(server.http, _LIVE.replace(b"health/live", b"models/m"), _PATIENCE)
        assert (refused.statuses, refused.closed) == ((503,), True)
        assert b"--max-connections" in refused.received
        alive = exchange(server.http, _LIVE, _PATIENCE)
        assert (alive.statuses, alive.closed) == ((200,), True)
        assert exchange(server.grpc, _GREETING, _PATIENCE).closed
    eventually(lambda: get(server.http, "/v2").status == 200, "a place for another connection")
