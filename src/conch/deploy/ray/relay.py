"""Passes what came through Ray Serve's proxies on to the ports of the server in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import grpc
import grpc.aio
import orjson
from yarl import URL

from conch.errors import one_line
from conch.wire.grpc.outgoing import ANY_SIZE, SERVICE_PATH

#: Headers that belong to one connection (RFC 9110, 7.6.1), and what the next one counts anew.
_OF_A_CONNECTION: Final = frozenset(
    {"connection", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
)
#: What aiohttp would say in the name of a client that has not said it.
_UNSAID: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

Headers = Sequence[tuple[str, str]]
#: What is sent beside the messages of a call over gRPC; bytes where a key ends with ``-bin``.
Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The status and the headers of an answer, before its body."""

    status: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class RpcError:
    """The status with which a call over gRPC failed: the name of its code, and its words."""

    code: str
    details: str


class Relay:
    """Calls to the server at ``http`` and ``grpc`` (URLs).  Belongs to one event loop."""

    def __init__(self, http: str, grpc_url: str) -> None:
        self._http = http
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            skip_auto_headers=_UNSAID,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._channel: Any = grpc.aio.insecure_channel(urlsplit(grpc_url).netloc, options=ANY_SIZE)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
        await self._channel.close()

    async def http(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> AsyncGenerator[HttpHead | bytes, None]:
        """Ask for ``target`` (path and query, as they were sent); the head of the answer, then its body as it comes.

        The answer is a 503 of its own where the server has closed its port.
        """
        kept = [(name, value) for name, value in headers if name.lower() not in _OF_A_CONNECTION]
        url = URL(self._http + target, encoded=True)
        try:
            answer = await self._session.request(method, url, headers=kept, data=body, allow_redirects=False)
        except aiohttp.ClientConnectionError as error:
            yield HttpHead(503, [("content-type", "application/json")])
            yield orjson.dumps({"error": f"the server does not answer: {one_line(error)}"})
            return
        async with answer:
            yield HttpHead(
                answer.status, [(n, v) for n, v in answer.headers.items() if n.lower() not in _OF_A_CONNECTION]
            )
            async for chunk in answer.content.iter_any():
                yield chunk

    async def rpc(self, method: str, message: bytes, metadata: Metadata) -> bytes | RpcError:
        """Call a method that has one answer, with the bytes of its message."""
        call: Any = self._channel.unary_unary(SERVICE_PATH + method)
        try:
            return bytes(await call(message, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            return RpcError(error.code().name, error.details() or "")

    async def rpc_stream(
        self, method: str, message: bytes, metadata: Metadata
    ) -> AsyncGenerator[bytes | RpcError, None]:
        """Send one message on a stream and close that side; the answers as they come."""
        call: Any = self._channel.stream_stream(SERVICE_PATH + method)

        async def once() -> AsyncIterator[bytes]:
            yield message

        answers = call(once(), metadata=metadata)
        try:
            async for answer in answers:
                yield bytes(answer)
        except grpc.aio.AioRpcError as error:
            yield RpcError(error.code().name, error.details() or "")
        finally:
            answers.cancel()  # where the client has gone; does nothing to a call that has ended


class Relaying:
    """What Ray Serve's proxies call of a replica and of an ingress: each call goes to the ports of its ``_relay``."""

    _relay: Relay

    async def http(self, method: str, target: str, headers: Headers, body: bytes) -> AsyncIterator[HttpHead | bytes]:
        """A request over HTTP."""
        async for part in self._relay.http(method, target, headers, body):
            yield part

    async def rpc(self, method: str, message: bytes, metadata: Metadata) -> bytes | RpcError:
        """A call over gRPC."""
        return await self._relay.rpc(method, message, metadata)

    async def rpc_stream(self, method: str, message: bytes, metadata: Metadata) -> AsyncIterator[bytes | RpcError]:
        """One message of a stream over gRPC."""
        async for answer in self._relay.rpc_stream(method, message, metadata):
            yield answer
