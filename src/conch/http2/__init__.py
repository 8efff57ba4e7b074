"""HTTP/2 for gRPC (RFC 9113, RFC 7541): the server side of connections, and the codec that clients share.

A server implements ``Http2Application`` and ``ConnectionObserver`` and creates one ``Http2Connection``, an
``asyncio.Protocol``, for each TCP connection. The connection parses frames, enforces ``Http2Limits`` and flow control,
and opens a stream for each request: the application responds through ``Http2Stream`` and receives the body as a
``StreamHandler``. Raise ``StreamFault`` to reset a stream.

A client builds frames with :mod:`conch.http2.frames` and decodes responses with ``HeaderDecoder``.

Server push, priorities and upgrades from HTTP/1.1 are not supported, because no gRPC client uses them. The package
needs nothing of conch but the type of a buffer. Everything runs on one event loop.
"""

from conch.http2 import frames
from conch.http2.connection import ConnectionObserver, ExceededLimit, Http2Connection
from conch.http2.frames import ConnectionFault, Http2ErrorCode, StreamFault
from conch.http2.headers import MAX_HEADER_LIST, Field, HeaderDecoder, encode_headers, list_size
from conch.http2.limits import MESSAGE_WINDOW, STREAM_WINDOW, ByteCounter, Http2Limits, LoopBudget, PingLimits
from conch.http2.streams import IGNORE, Http2Application, Http2Stream, StreamHandler

__all__ = [
    "IGNORE",
    "MAX_HEADER_LIST",
    "MESSAGE_WINDOW",
    "STREAM_WINDOW",
    "ByteCounter",
    "ConnectionFault",
    "ConnectionObserver",
    "ExceededLimit",
    "Field",
    "HeaderDecoder",
    "Http2Application",
    "Http2Connection",
    "Http2ErrorCode",
    "Http2Limits",
    "Http2Stream",
    "LoopBudget",
    "PingLimits",
    "StreamFault",
    "StreamHandler",
    "encode_headers",
    "frames",
    "list_size",
]
