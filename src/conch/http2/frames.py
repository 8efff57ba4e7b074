"""HTTP/2 constants (RFC 9113): frame types, flags, settings, error codes; and the encoding of frames.

Does no I/O.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

#: Default values until a SETTINGS or WINDOW_UPDATE frame changes them (bytes).
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME_SIZE: Final = 16_384
MAX_WINDOW: Final = 2**31 - 1

#: A frame header: length (24 bits) and type (8 bits), flags, stream ID.
FRAME: Final = Struct(">IBI")
WORD: Final = Struct(">I")
SETTING: Final = Struct(">HI")
GOAWAY_HEAD: Final = Struct(">II")


class Http2ErrorCode(IntEnum):
    """The reason for which a stream or a connection ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """The client violated a rule of the connection, which ends with a GOAWAY with this code and message."""

    def __init__(self, code: Http2ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFault(Exception):
    """The client violated a rule of a stream, which ends with a RST_STREAM with this code."""

    def __init__(self, code: Http2ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the settings in a SETTINGS frame; the last of equal ones applies.

    Raises ``ConnectionFault`` for an invalid value.
    """
    values: dict[int, int] = {}
    for setting, value in SETTING.iter_unpack(payload):
        _check_setting(setting, value)
        values[setting] = value
    return values


def _check_setting(setting: int, value: int) -> None:
    if setting == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "window too large")
    if setting == MAX_FRAME_SIZE and not DEFAULT_FRAME_SIZE <= value < 1 << 24:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "frame size out of range")
    if setting == ENABLE_PUSH and value > 1:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a frame of type ``kind`` on stream ``stream``, 0 for the connection."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame with these values."""
    return frame(SETTINGS, 0, 0, b"".join([SETTING.pack(*item) for item in values.items()]))


def window_update(stream: int, increment: int) -> bytes:
    """Encode a WINDOW_UPDATE frame that allows the client ``increment`` more bytes."""
    return frame(WINDOW_UPDATE, 0, stream, WORD.pack(increment))


def rst_stream(stream: int, code: Http2ErrorCode) -> bytes:
    """Encode a RST_STREAM frame, which ends a stream at once."""
    return frame(RST_STREAM, 0, stream, WORD.pack(code))


def goaway(last_stream: int, code: Http2ErrorCode, message: str = "") -> bytes:
    """Encode a GOAWAY frame; streams above ``last_stream`` are not served."""
    return frame(GOAWAY, 0, 0, GOAWAY_HEAD.pack(last_stream, code) + message.encode())


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of a HEADERS or DATA frame without the padding and priority announced by ``flags``.

    Raises ``ConnectionFault`` if they do not fit into it.
    """
    start, end = 0, len(payload)
    if flags & PADDED:
        if not end:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "padded frame without a padding length")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "padding or priority exceeds the frame")
    return payload[start:end]
