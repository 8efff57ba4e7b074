"""Fetches the images and recordings of requests from hosts that the operator names.

A connection is made to an address that was checked: neither DNS nor a redirect leads into the operator's network.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import httptools

from conch.frontends.http.model_requests import EntryNeeded
from conch.wire.openai.reading import ApiError

#: Limits of a file (bytes), of the files of a request (bytes, number) and of the time to fetch one (s).
MAX_FILE: Final = 20 << 20
MAX_TOGETHER: Final = 64 << 20
MAX_FILES: Final = 32
SECONDS: Final = 10.0
#: Maximum number of redirects, and maximum size of the header of a response (bytes).
_REDIRECTS: Final = 3
_HEADER: Final = 64 << 10
_CHUNK: Final = 64 << 10
#: Networks of addresses that are translated to IPv4 addresses: to the last 32 bits, and in a way that is not known.
_TRANSLATED: Final = ip_network("64:ff9b::/96")
_LOCALLY_TRANSLATED: Final = ip_network("64:ff9b:1::/48")
_PORTS: Final = {"http": 80, "https": 443}

Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
#: Counts bytes that have arrived; raises an error if there are too many.
Hold = Callable[[int], None]


@cache
def secure_context() -> ssl.SSLContext:
    """Return the context of all connections. Takes long: it reads the certificates of the machine."""
    return ssl.create_default_context()


async def _addresses(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host. Raises OSError if it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)  # SOCK_STREAM
    return [str(entry[4][0]) for entry in found]


class MediaFetcher:
    """Fetches from ``domains`` and no other host; ``resolve`` and ``connect`` are those of asyncio."""

    def __init__(
        self, domains: Sequence[str], *, resolve: Resolve = _addresses, connect: Connect = asyncio.open_connection
    ) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._resolve, self._connect = resolve, connect

    def for_request(self, hold: Hold) -> Callable[[list[str]], list[bytes]] | None:
        """Return a function that returns the files at URLs, or raises EntryNeeded until they have been fetched.

        None if there are no hosts to fetch from. ``hold`` counts the bytes of the files as they arrive.
        """
        if not self._domains:
            return None
        files: dict[str, bytes] = {}

        def fetch(urls: list[str]) -> list[bytes]:
            missing = [url for url in dict.fromkeys(urls) if url not in files]
            if len(urls) > MAX_FILES:
                raise ApiError(f"the request has {len(urls)} URLs of files; at most {MAX_FILES} are fetched")
            if missing:
                raise EntryNeeded(partial(self._keep, files, missing, hold))
            return [files[url] for url in urls]

        return fetch

    async def _keep(self, files: dict[str, bytes], urls: Sequence[str], hold: Hold) -> int:
        """Fetch files and keep them in ``files``; returns their size (bytes). Ends all connections if one fails."""
        together = 0

        def arrived(size: int) -> None:
            nonlocal together
            together += size
            if together > MAX_TOGETHER:
                raise ApiError(f"the files of the request have more than {MAX_TOGETHER >> 20} MiB together")
            hold(size)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(self.fetch(url, arrived)) for url in urls}
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        files.update({url: task.result() for url, task in tasks.items()})
        return together

    async def fetch(self, url: str, arrived: Hold = lambda size: None) -> bytes:
        """Return the file at a URL; ``arrived`` is called with the size of each part of it (bytes), and may raise.

        Raises ApiError for a host that is not allowed, and if the file cannot be fetched within the limits.
        """
        try:
            async with asyncio.timeout(SECONDS):
                for _ in range(_REDIRECTS + 1):
                    status, location, body = await self._get(url, arrived)
                    if status not in (301, 302, 303, 307, 308) or not location:
                        break
                    url = urljoin(url, location)
                else:
                    raise ApiError(f"the file has more than {_REDIRECTS} redirects")
        except TimeoutError:
            raise ApiError(f"the file could not be fetched within {SECONDS:g} seconds") from None
        except (OSError, ValueError, ssl.SSLError, httptools.HttpParserError) as error:
            # The details describe the operator's network.
            raise ApiError(f"the file could not be fetched: {type(error).__name__}") from None
        if status != 200:
            raise ApiError(f"the file could not be fetched: its host responded with status {status}")
        return body

    async def _get(self, url: str, arrived: Hold) -> tuple[int, str, bytes]:
        """Return the status, the header ``Location`` and the body of the response for a URL."""
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        if parts.scheme not in _PORTS or parts.username is not None or parts.password is not None:
            raise ApiError("files are fetched over http and https, without a user name")
        port = parts.port or _PORTS[parts.scheme]
        named = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
        if named not in self._domains:
            raise ApiError(f"files are not fetched from host '{named[:200]}': send the file as a data URL")
        address = await self._public_address(host, port)
        secure: dict[str, Any] = {}
        if parts.scheme == "https":
            secure = {"ssl": await asyncio.to_thread(secure_context), "server_hostname": host}
        reader, writer = await self._connect(address, port, **secure)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            head = (
                f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: conch\r\nAccept: image/*, audio/*\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
            )
            if not head.isascii() or any(character in parts.netloc + path for character in "\r\n\t "):
                raise ApiError("the address of the file has characters that must be escaped")
            writer.write(head.encode())
            response = _Response()
            parser = httptools.HttpResponseParser(response)
            while not response.complete and (data := await reader.read(_CHUNK)):
                before = len(response.body)
                parser.feed_data(data)
                arrived(len(response.body) - before)
                if response.problem:
                    raise ApiError(response.problem)
            if response.has_length and not response.complete:
                raise ApiError("the file could not be fetched: its response ended early")
            return parser.get_status_code(), response.location, bytes(response.body)
        finally:
            writer.close()

    async def _public_address(self, host: str, port: int) -> str:
        """Return an address of a host. Raises ApiError unless all of its addresses are public."""
        addresses = await self._resolve(host, port)
        for text in addresses:
            address = ip_address(text.partition("%")[0])
            if isinstance(address, IPv6Address):
                embedded = IPv4Address(int(address) & 0xFFFFFFFF) if address in _TRANSLATED else None
                embedded = embedded or address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
                address = embedded or address
            if not address.is_global or address.is_multicast or address in _LOCALLY_TRANSLATED:
                raise ApiError(f"files are not fetched from host '{host[:200]}': its address is not public")
        return addresses[0]


class _Response:
    """Receives the parts of a response from httptools; ``problem`` is the limit that it exceeds, or empty."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.location = ""
        self.complete = self.has_length = False
        self.problem = ""
        self._header = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header += len(name) + len(value)
        if self._header > _HEADER:
            self.problem = "the header of the response with the file is too large"
        self.has_length |= name.lower() in (b"content-length", b"transfer-encoding")
        if name.lower() == b"location":
            self.location = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > MAX_FILE:
            self.problem = f"the file has more than {MAX_FILE >> 20} MiB"
        else:
            self.body += data

    def on_message_complete(self) -> None:
        self.complete = True
