"""Images are fetched from the hosts that the operator names, at addresses that are public, within limits."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from conch.core.errors import ConchError
from conch.frontends.budget import ByteBudget
from conch.frontends.http import media_fetching
from conch.frontends.http.media_fetching import MediaFetcher
from conch.frontends.http.model_requests import EntryNeeded
from conch.wire.openai.reading import ApiError
from tests.unit.fake_clock import settle

PUBLIC = "93.184.216.34"


class Web:
    """A host's responses by path, at any address; keeps the addresses of connections."""

    def __init__(self, **responses: bytes) -> None:
        self.responses = responses
        self.connected: list[str] = []
        self.secure: list[Any] = []
        self.closed = 0
        self.addresses: dict[str, list[str]] = {}

    def fetcher(self, *domains: str) -> MediaFetcher:
        return MediaFetcher(domains, resolve=self._resolve, connect=self._connect)

    async def _resolve(self, host: str, port: int) -> list[str]:
        return self.addresses.get(host, [PUBLIC])

    async def _connect(self, address: str, port: int, **secure: Any) -> Any:
        self.connected.append(address)
        self.secure.append(secure.get("ssl"))
        reader = asyncio.StreamReader()
        return reader, _Writer(reader, self)


class _Writer:
    def __init__(self, reader: asyncio.StreamReader, web: Web) -> None:
        self._reader, self._web = reader, web

    def write(self, data: bytes) -> None:
        path = data.split(b" ", 2)[1].partition(b"?")[0].decode().strip("/")
        self._reader.feed_data(self._web.responses[path])
        if path != "stalls":
            self._reader.feed_eof()

    def close(self) -> None:
        self._web.closed += 1


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def moved(url: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n".encode()


def refused(run: Callable[[], Awaitable[Any]]) -> str:
    async def fail() -> str:
        with pytest.raises(ApiError) as error:
            await run()
        return error.value.message

    return asyncio.run(fail())


def test_a_file_is_fetched_from_the_address_that_was_checked() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    web = Web(a=ok(b"file"), b=chunked, c=moved("https://images.example/a"))
    fetcher = web.fetcher("images.example")
    for path, file in (("a", b"file"), ("b", b"abcde"), ("c", b"file")):
        assert asyncio.run(fetcher.fetch(f"http://images.example/{path}")) == file
    assert set(web.connected) == {PUBLIC}


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1", "::1",
     "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::10.0.0.1", "64:ff9b:1::1"],
)  # fmt: skip
def test_an_address_that_is_not_public_is_never_connected_to(address: str) -> None:
    web = Web(a=ok(b"file"))
    web.addresses["images.example"] = [PUBLIC, address]
    assert "not public" in refused(lambda: web.fetcher("images.example").fetch("http://images.example/a"))
    assert web.connected == []


@pytest.mark.parametrize(
    "url",
    ["http://other.example/a", "http://images.example:8080/a", "http://images.example@other.example/a",
     "http://user@images.example/a", "ftp://images.example/a", "http://127.0.0.1/a"],
)  # fmt: skip
def test_a_host_that_the_operator_did_not_name_is_never_connected_to(url: str) -> None:
    web = Web(a=ok(b"file"))
    assert refused(lambda: web.fetcher("images.example").fetch(url))
    assert web.connected == []


def test_redirects_are_checked_like_the_first_url() -> None:
    web = Web(
        other=moved("http://other.example/a"), private=moved("http://inside.example/a"), loop=moved("/loop"), a=ok(b"")
    )
    web.addresses["inside.example"] = ["10.0.0.1"]
    fetcher = web.fetcher("images.example", "inside.example")
    assert "other.example" in refused(lambda: fetcher.fetch("http://images.example/other"))
    assert "not public" in refused(lambda: fetcher.fetch("http://images.example/private"))
    assert "redirects" in refused(lambda: fetcher.fetch("http://images.example/loop"))
    assert set(web.connected) == {PUBLIC}


def test_limits_of_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_fetching, "MAX_FILE", 1000)
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 2000
    web = Web(
        large=endless,
        stalls=b"HTTP/1.1 200 OK\r\n",
        short=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfile",
        broken=b"hello\r\n\r\n",
        missing=b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
    )
    fetcher = web.fetcher("images.example")
    assert "MiB" in refused(lambda: fetcher.fetch("http://images.example/large"))
    assert "could not be fetched" in refused(lambda: fetcher.fetch("http://images.example/broken"))
    assert "ended early" in refused(lambda: fetcher.fetch("http://images.example/short"))
    assert "404" in refused(lambda: fetcher.fetch("http://images.example/missing"))
    monkeypatch.setattr(media_fetching, "SECONDS", 0.05)
    assert "within" in refused(lambda: fetcher.fetch("http://images.example/stalls"))


def test_a_request_waits_for_its_files() -> None:
    web = Web(a=ok(b"file"), b=ok(b"other"))
    held: list[int] = []
    fetch = web.fetcher("images.example").for_request(held.append)
    assert fetch is not None and web.fetcher().for_request(held.append) is None
    urls = ["http://images.example/a", "http://images.example/b", "http://images.example/a"]

    async def fetched() -> list[bytes]:
        with pytest.raises(EntryNeeded) as needed:
            fetch(urls)
        await needed.value.wait()
        return fetch(urls)

    assert asyncio.run(fetched()) == [b"file", b"other", b"file"]
    assert sum(held) == 9
    with pytest.raises(ApiError, match="at most"):
        fetch(urls[:1] * 33)


async def test_nothing_is_fetched_for_a_request_that_no_longer_waits() -> None:
    web = Web(a=ok(b"file"))
    fetch = web.fetcher("images.example").for_request(lambda size: pytest.fail("the request is over"))
    assert fetch is not None
    with pytest.raises(EntryNeeded):
        fetch(["http://images.example/a"])
    await settle()
    assert web.connected == []


@pytest.mark.parametrize("limit", ["the request's", "the server's"])
def test_files_count_as_they_arrive(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    own = limit == "the request's"
    monkeypatch.setattr(media_fetching, "MAX_TOGETHER", (2 if own else 100) << 20)
    part = b"HTTP/1.1 200 OK\r\nContent-Length: 8000000\r\n\r\n" + bytes(1_500_000)
    web = Web(stalls=part)
    budget = ByteBudget(100 << 20 if own else 2 << 20)

    def hold(size: int) -> None:
        if not budget.take(size):
            raise budget.refusal()

    fetch = web.fetcher("images.example").for_request(hold)
    assert fetch is not None

    async def run() -> None:
        with pytest.raises(EntryNeeded) as needed:
            fetch([f"http://images.example/stalls?{number}" for number in range(4)])
        await needed.value.wait()

    # None of the files arrives in full.
    with pytest.raises(ConchError, match="2 MiB together" if own else "max-bytes-in-flight"):
        asyncio.run(run())
    assert budget.used <= 3 << 20
    assert web.closed == 4


def test_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(threading.get_ident()) or object())
    media_fetching.secure_context.cache_clear()
    web = Web(a=ok(b"file"))
    fetcher = web.fetcher("images.example")
    for _ in range(3):
        assert asyncio.run(fetcher.fetch("https://images.example/a")) == b"file"
    media_fetching.secure_context.cache_clear()
    assert len(web.secure) == 3 and len(set(web.secure)) == 1
    assert len(made) == 1 and made[0] != threading.get_ident()


def test_line_ends_in_a_url_are_not_sent() -> None:
    web = Web(a=ok(b"file"))
    message = refused(lambda: web.fetcher("images.example").fetch("http://images.example/a b\r\nX: y"))
    assert "escaped" in message
