"""Splits the received bytes of a connection into frames.

Owned by the connection, whose session handles each frame; runs on the event loop. Control frames are passed on whole.
The payload of DATA frames goes to its stream as it arrives, so that large frames need not be buffered. When the
event-loop budget is spent, the rest of the received bytes waits here.
"""

from __future__ import annotations

from typing import Final

from conch.http2.frames import (
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
from conch.http2.limits import MAX_CONTROL_FRAME, MAX_HEADER_BLOCK, RECEIVE_FRAME_SIZE, LoopBudget
from conch.http2.session import Http2Session
from conch.http2.streams import Http2Stream

#: Chunks of at least this size (bytes) are views of the received buffer if they are at least a quarter of it.
_MIN_VIEW: Final = 4096


#: The number of frames, or the size of one (bytes), after which the reader checks the event-loop budget.
_UNASKED: Final = 8
_HEAVY: Final = 1024


class Http2FrameReader:
    """Reads frames from chunks of any size; keeps the received part of an incomplete frame.

    ``frames`` counts the reads with complete frames.
    """

    def __init__(self, handler: Http2Session, loop_budget: LoopBudget) -> None:
        self._handler = handler
        self._loop_budget = loop_budget
        self.frames = 0
        self._greeted = False
        self._buffer = bytearray()
        #: Bytes that the buffer must hold before it is read again.
        self._needed = len(PREFACE)
        #: Received bytes that are queued, and the position of the next frame in them.
        self._rest = b""
        self._at = 0
        #: A DATA frame in progress: its stream, remaining payload and padding (bytes), and whether it ends the stream.
        self._data: tuple[Http2Stream | None, int, int, bool] | None = None

    @property
    def partial(self) -> bool:
        """Whether a frame other than DATA has arrived in part."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> bool:
        """Read the received bytes as far as the event-loop budget allows; returns whether all of them were read.

        Without data, it continues with queued bytes. Raises ``ConnectionFault`` for invalid HTTP/2.
        """
        at = 0
        if self._rest or self._buffer or not self._greeted:
            data, at = self._join(data)
            if at < 0:
                return True
        at = self._read(data, at)
        if self._at:
            self._rest = data
            return False
        if at:
            self.frames += 1
        if at < len(data):
            self._buffer += memoryview(data)[at:]
        return True

    def put_off(self, data: bytes) -> None:
        """Queue received bytes for :meth:`feed`."""
        self._rest = self._rest[self._at :] + bytes(self._buffer) + data
        self._at = 0
        self._buffer.clear()

    def _join(self, data: bytes) -> tuple[bytes, int]:
        """Join queued and received bytes; returns them with the position of the next frame, -1 if it is incomplete."""
        at = 0
        if self._rest:
            rest, at = self._rest, self._at
            self._rest = b""
            if data:
                rest, at = rest[at:] + data, 0
            data = rest
        elif self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return b"", -1
            data = bytes(self._buffer)
            self._buffer.clear()
        if not self._greeted:
            at = self._check_preface(data)
            if not self._greeted:
                self._buffer += data
                return b"", -1
        return data, at

    def _check_preface(self, data: bytes) -> int:
        size = len(PREFACE)
        if data[:size] != PREFACE[: len(data)]:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 client")
        self._greeted = len(data) >= size
        return size if self._greeted else 0

    def _read(self, data: bytes, at: int) -> int:
        """Handle complete frames from ``at`` on; returns the position of the first incomplete one.

        Sets ``_at`` to the position at which the event-loop budget was spent, otherwise to 0.
        """
        handler = self._handler
        over = self._loop_budget.over
        self._at = 0
        if self._data is not None:
            at = self._continue_data(data, at)
        end = len(data)
        unasked = _UNASKED
        while end - at >= 9 and not handler.closed:
            word, flags, stream_id = FRAME.unpack_from(data, at)
            length, kind, stream_id = word >> 8, word & 0xFF, stream_id & MAX_WINDOW
            body = at + 9
            if length > RECEIVE_FRAME_SIZE:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "frame larger than announced")
            if kind == DATA:
                if flags & PADDED and length and body == end:
                    self._needed = 10
                    return at
                at = self._begin_data(flags, stream_id, length, data, body)
            else:
                if length > MAX_CONTROL_FRAME:
                    _check_size(kind, length)
                if end - body < length:
                    self._needed = 9 + length
                    return at
                at = body + length
                handler.on_frame(kind, flags, stream_id, data[body:at])
            if at < end:
                unasked -= 1
                if (unasked <= 0 or length > _HEAVY) and over():
                    self._at = at
                    return at
                if unasked <= 0:
                    unasked = _UNASKED
        self._needed = 9
        return at

    def _begin_data(self, flags: int, stream_id: int, length: int, data: bytes, at: int) -> int:
        """Handle the received part of the DATA frame whose payload begins at ``at``; returns the end of that part."""
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
        stream = self._handler.on_data(stream_id, length, payload, last)
        end = at + payload
        if end + padding > len(data):
            self._data = (stream, payload, padding, last)
            return self._continue_data(data, at)
        if stream is not None:
            stream.receive(_chunk(data, at, end), last)
        return end + padding

    def _continue_data(self, data: bytes, at: int) -> int:
        """Handle more of the DATA frame in progress from ``at`` on; returns the end of the received part."""
        assert self._data is not None
        stream, payload, padding, last = self._data
        taken = min(payload, len(data) - at)
        payload -= taken
        skipped = 0 if payload else min(padding, len(data) - at - taken)
        padding -= skipped
        done = not payload and not padding
        self._data = None if done else (stream, payload, padding, last)
        if stream is not None and (taken or done):
            stream.receive(_chunk(data, at, at + taken), last and done)
        return at + taken + skipped


def _check_size(kind: int, length: int) -> None:
    """Refuse a frame other than DATA that is larger than necessary."""
    if kind not in (HEADERS, CONTINUATION):
        raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "control frame too large")
    if length > MAX_HEADER_BLOCK:
        raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")


def _chunk(data: bytes, start: int, end: int) -> bytes | memoryview:
    """Return a part of received data: a view if it is much of the data, otherwise a copy that keeps no buffer alive."""
    if end - start >= _MIN_VIEW and 4 * (end - start) >= len(data):
        return memoryview(data)[start:end]
    return data[start:end]
