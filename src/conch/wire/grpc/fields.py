"""Encoded fields of gRPC messages; extracts the tensors of a ``ModelInferRequest`` without copying them.

The protocol buffers library copies a message twice to get at its bytes and holds the interpreter lock during that time.
Used by the gRPC front end for large messages, and to write messages around tensors; does no I/O.
"""

from __future__ import annotations

from typing import Final

from conch.core.tensors import Buffer

#: The key (field number and wire type) of ``raw_input_contents``.
_RAW_INPUT_CONTENTS: Final = 7 << 3 | 2
#: The size (bytes) of values by wire type, for fixed-size types.
_FIXED: Final = {1: 8, 5: 4}
#: Maximum number of fields read on the event loop; messages with more are offloaded.
MAX_FIELDS: Final = 4096


def split_message(message: Buffer) -> tuple[bytes, list[memoryview]] | None:
    """Return a ``ModelInferRequest`` without its raw contents, and the raw contents as parts of ``message``.

    Returns None for a message with more than ``MAX_FIELDS`` fields. Raises ``ValueError`` for an invalid message.
    """
    view = memoryview(message)
    end = len(view)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    at = start = 0
    for _ in range(MAX_FIELDS):
        if at == end:
            rest.append(view[start:at])
            return b"".join(rest), raw
        begin = at
        key, at = _varint(view, at)
        kind = key & 7
        if kind == 2:
            size, at = _varint(view, at)
            at += size
        elif kind == 0:
            _, at = _varint(view, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"wire type {kind}")
        if at > end:
            raise ValueError("field beyond the end")
        if key == _RAW_INPUT_CONTENTS:
            rest.append(view[start:begin])
            raw.append(view[at - size : at])
            start = at
    return None


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return a number and its end; raises ``ValueError`` if it is truncated or longer than ten bytes."""
    value = shift = 0
    for byte in view[at : at + 10]:
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("malformed number")


def varint(value: int) -> bytes:
    """Encode a number: seven bits per byte, the lowest first."""
    if value < 128:
        return bytes((value,))
    digits = bytearray()
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)
