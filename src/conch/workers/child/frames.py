"""The frames (IPC messages) of the channel between the server and a worker.

A frame consists of ``<header length><payload length>`` (two little-endian unsigned 32-bit integers), a JSON object with
the key ``op``, and the payload: the bytes of small tensors, in the order in which the header names them. Nothing in a
frame is ever executed.

Used at both ends, in any environment (standard library only).
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable

from conch.core.errors import internal
from conch.core.tensors import Buffer

Header = dict[str, Any]
Frame = tuple[Header, bytearray]

#: Maximum size of a header or payload (bytes); a frame that announces more is invalid.
FRAME_LIMIT = 256 << 20

_HEAD = struct.Struct("<II")
_CAPACITY = 256 << 10
_JOIN_LIMIT = 32 << 10
_ANCILLARY = socket.CMSG_SPACE(16 * 4)
# Plain integers: enum members are slow to combine.
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))

try:
    import orjson

    loads: Callable[[memoryview], Any] = orjson.loads
    _fast_dumps: Callable[[Header], bytes] = orjson.dumps
except ImportError:

    def loads(data: memoryview) -> Any:
        return json.loads(bytes(data))

    def _fast_dumps(header: Header) -> bytes:
        return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def dumps(header: Header) -> bytes:
    """Encode a header as JSON; invalid Unicode (a surrogate from a file name) is replaced."""
    try:
        return _fast_dumps(header)
    except (TypeError, UnicodeEncodeError):
        return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encode_frame(header: Header, payload: Sequence[Buffer] = (), size: int = 0) -> list[Buffer]:
    """Encode a frame as buffers; ``size`` is the total size of the ``payload`` (bytes)."""
    text = dumps(header)
    if size > _JOIN_LIMIT:
        return [_HEAD.pack(len(text), size) + text, *payload]
    return [b"".join((_HEAD.pack(len(text), size), text, *payload))]


class FrameReader:
    """Splits a stream into frames: reads into one buffer, and keeps received descriptors in order."""

    def __init__(self) -> None:
        self.fds: deque[int] = deque()
        self._buffer = bytearray(_CAPACITY)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def receive(self, connection: socket.socket, flags: int = 0) -> list[Frame]:
        """Read once and return the completed frames, possibly none.

        Raises EOFError if the peer has closed the socket, BlockingIOError if a non-blocking socket has no data, and
        INTERNAL for an invalid frame.
        """
        count, ancillary, state, _ = connection.recvmsg_into((self._view[self._end :],), _ANCILLARY, flags | _CLOEXEC)
        if ancillary:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self.fds.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
            if state & socket.MSG_CTRUNC:
                raise internal("file descriptors were lost on the channel")
        if not count:
            raise EOFError("the channel has been closed")
        self._end += count
        return self._cut()

    def close(self) -> None:
        """Close the descriptors that no frame has claimed."""
        while self.fds:
            os.close(self.fds.popleft())

    def _cut(self) -> list[Frame]:
        frames: list[Frame] = []
        start, end, buffer = self._start, self._end, self._buffer
        needed = 8
        while end - start >= 8:
            header_size, payload_size = _HEAD.unpack_from(buffer, start)
            needed = 8 + header_size + payload_size
            if end - start < needed:
                if header_size > FRAME_LIMIT or payload_size > FRAME_LIMIT:
                    raise internal(f"a frame claims {header_size} + {payload_size} bytes")
                break
            middle = start + 8 + header_size
            start += needed
            try:
                header = loads(self._view[middle - header_size : middle])
            except ValueError as error:
                raise internal(f"the header of a frame is not JSON: {error}") from None
            if type(header) is not dict or type(header.get("op")) is not str:
                raise internal("the header of a frame is not an object with an op")
            frames.append((header, buffer[middle:start]))
            needed = 8
        if start == end:
            start = end = 0
        self._start, self._end = start, end
        if start + needed > len(buffer) or (end == 0 and len(buffer) > _CAPACITY):
            self._make_room(needed)
        return frames

    def _make_room(self, needed: int) -> None:
        """Move the unfinished frame to the front of a buffer that can hold it."""
        rest = self._buffer[self._start : self._end]
        if max(needed, _CAPACITY) != len(self._buffer):
            self._buffer = bytearray(max(needed, _CAPACITY))
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
