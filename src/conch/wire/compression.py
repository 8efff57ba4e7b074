"""Compresses and decompresses HTTP bodies according to ``Accept-Encoding`` and ``Content-Encoding``.

Called by the HTTP front end; does no I/O. Decompression is limited, so that a small body cannot become a huge one.
``deflate`` is the zlib format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final

from conch.core.errors import Code, ConchError, invalid
from conch.core.tensors import Buffer

#: The ``Accept-Encoding`` header of the 501 response to an unsupported encoding.
ACCEPTED: Final = "gzip, deflate"
#: The ``reason`` of the errors for an unsupported encoding, and for data that cannot be decompressed.
UNSUPPORTED_ENCODING: Final = "unsupported_content_encoding"
UNDECODABLE: Final = "undecodable_body"

#: Accepts either format regardless of the header, as Triton does.
_EITHER: Final = 32 + zlib.MAX_WBITS
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def decompress(body: Buffer, encoding: str, limit: int) -> Buffer:
    """Return the decompressed body; ``encoding`` is the value of ``Content-Encoding``, empty if missing.

    Raises UNSUPPORTED for an unknown encoding, INVALID_ARG for more than ``limit`` bytes and for data that is damaged,
    truncated or followed by other data.
    """
    if is_identity(encoding):
        return body
    data = decompress_limited(body, encoding, limit)
    if data is None:
        raise invalid(
            f"Decompressed data size exceeds the maximum allowed value of {limit} bytes."
            " Use --http-max-input-size to increase the limit."
        )
    return data


def is_identity(encoding: str) -> bool:
    """Whether ``Content-Encoding`` means an uncompressed body."""
    return encoding.strip().lower() in ("", "identity")


def decompress_limited(body: Buffer, encoding: str, limit: int) -> bytes | None:
    """Return the decompressed body, None if it exceeds ``limit`` bytes. Raises the errors of :func:`decompress`."""
    encoding = encoding.strip().lower()
    if encoding not in _WINDOW_BITS:
        raise ConchError("Unsupported compression type", Code.UNSUPPORTED, reason=UNSUPPORTED_ENCODING)
    if not len(body):
        raise invalid("nothing to be decompressed", reason=UNDECODABLE)
    decompressor = zlib.decompressobj(_EITHER)
    try:
        # One byte more than allowed is enough to detect an excess.
        data = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise _undecodable(encoding, error) from None
    if len(data) > limit:
        return None
    if not decompressor.eof:
        raise _undecodable(encoding, "it is truncated")
    if decompressor.unused_data:
        raise _undecodable(encoding, "other data follows it")
    return data


def _undecodable(encoding: str, why: object) -> ConchError:
    return invalid(f"failed to decompress the request body ({encoding}): {why}", reason=UNDECODABLE)


def check_identity(encoding: str) -> None:
    """Raise INVALID_ARG for compressed bodies of ``generate`` and ``generate_stream``, as Triton does."""
    if encoding != "identity":
        raise invalid("Unsupported content-encoding, only 'identity' is supported.")


def negotiate(accept: str) -> str:
    """Return the encoding for a response to ``Accept-Encoding``: ``gzip``, ``deflate`` or ``identity``.

    The highest weight wins, among equal weights the first. Without a match, the response is not compressed.
    """
    best, highest = "identity", 0.0
    for item in accept.split(","):
        name, _, parameters = item.partition(";")
        name = name.strip().lower()
        weight = _weight(parameters)
        if weight > highest and (name in _WINDOW_BITS or name == "identity"):
            best, highest = name, weight
    return best


def _weight(parameters: str) -> float:
    key, _, value = parameters.partition(";")[0].partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def compress(parts: Iterable[Buffer], encoding: str) -> bytes:
    """Return the parts of a response body compressed with ``gzip`` or ``deflate``."""
    compressor = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    chunks = [compressor.compress(part) for part in parts]
    chunks.append(compressor.flush())
    return b"".join(chunks)
