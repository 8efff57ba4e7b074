"""Received bytes taken apart into frames.

Owned by a connection, which is told of each frame; runs on the event loop.  Control frames are
handed over whole.  The payload of DATA frames is passed on as it arrives, so that large frames
need not be collected first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conch.frontends.grpc.http2.frames import (
    CONTINUATION,
    DATA,
    END_STREAM,
    FRAME,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PREFACE,
    ConnectionFault,
    Http2ErrorCode,
)
from conch.frontends.grpc.http2.limits import MAX_HEADER_BLOCK, RECEIVE_FRAME_SIZE

if TYPE_CHECKING:
    from conch.frontends.grpc.http2.connection import Connection
    from conch.frontends.grpc.http2.streams import Stream

#: Chunks from this size on are views of the received buffer, if they are at least a quarter of it.
_VIEWED = 4096


class Http2FrameReader:
    """Holds what has arrived of a frame that is incomplete."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._greeted = False
        self._buffer = bytearray()
        #: Bytes that must be in the buffer before looking at it again is worth while.
        self._needed = len(PREFACE)
        #: A DATA frame in progress: its stream, bytes of payload and of padding to come, whether it ends the stream.
        self._data: tuple[Stream | None, int, int, bool] | None = None

    def feed(self, data: bytes) -> None:
        """Take received bytes; raises ``ConnectionFault``."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        at = 0 if self._greeted else self._check_preface(data)
        if self._greeted:
            at = self._read(data, at)
        if at < len(data):
            self._buffer += memoryview(data)[at:]

    def _check_preface(self, data: bytes) -> int:
        size = len(PREFACE)
        if data[:size] != PREFACE[: len(data)]:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 client")
        self._greeted = len(data) >= size
        return size if self._greeted else 0

    def _read(self, data: bytes, at: int) -> int:
        """Handle all complete frames from ``at`` on, and returns where the first incomplete one begins."""
        connection = self._connection
        if self._data is not None:
            at = self._continue(data, at)
        end = len(data)
        while end - at >= 9 and not connection.closed:
            word, flags, stream_id = FRAME.unpack_from(data, at)
            length, kind, stream_id = word >> 8, word & 0xFF, stream_id & MAX_WINDOW
            body = at + 9
            if length > RECEIVE_FRAME_SIZE:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "frame larger than announced")
            if kind == DATA:
                if flags & PADDED and length and body == end:
                    self._needed = 10
                    return at
                at = self._begin(flags, stream_id, length, data, body)
                continue
            if length > MAX_HEADER_BLOCK and kind in (HEADERS, CONTINUATION):
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
            if end - body < length:
                self._needed = 9 + length
                return at
            at = body + length
            connection.on_frame(kind, flags, stream_id, data[body:at])
        self._needed = 9
        return at

    def _begin(self, flags: int, stream_id: int, length: int, data: bytes, at: int) -> int:
        """Handle what is there of the DATA frame whose payload begins at ``at``; returns where the next one begins."""
        padding = 0
        payload = length
        if flags & PADDED:
            if not length:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "padded frame without a padding length")
            padding = data[at]
            payload = length - 1 - padding
            at += 1
            if payload < 0:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "padding exceeds the frame")
        last = bool(flags & END_STREAM)
        stream = self._connection.on_data(stream_id, length, payload, last)
        end = at + payload
        if end + padding > len(data):
            self._data = (stream, payload, padding, last)
            return self._continue(data, at)
        if stream is not None:
            stream.deliver(_chunk(data, at, end), last)
        return end + padding

    def _continue(self, data: bytes, at: int) -> int:
        assert self._data is not None
        stream, payload, padding, last = self._data
        taken = min(payload, len(data) - at)
        payload -= taken
        skipped = 0 if payload else min(padding, len(data) - at - taken)
        padding -= skipped
        done = not payload and not padding
        self._data = None if done else (stream, payload, padding, last)
        if stream is not None and (taken or done):
            stream.deliver(_chunk(data, at, at + taken), last and done)
        return at + taken + skipped


def _chunk(data: bytes, start: int, end: int) -> bytes | memoryview:
    """A part of received data: a view where it is much of it, or else a copy, which keeps nothing else alive."""
    if end - start >= _VIEWED and 4 * (end - start) >= len(data):
        return memoryview(data)[start:end]
    return data[start:end]
