"""Compresses and decompresses HTTP bodies as ``Accept-Encoding`` and ``Content-Encoding`` say.

Called by the HTTP front end; pure.  Decompression is bounded, so that a small body cannot become a huge one.
``deflate`` is the zlib format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Final

from conch.errors import invalid, unsupported
from conch.tensors import Buffer

#: The ``Accept-Encoding`` header of the 501 response to an encoding that is not supported.
ACCEPTED: Final = "gzip, deflate"
UNSUPPORTED_COMPRESSION: Final = "Unsupported compression type"

#: Either format is accepted whatever the header says, as Triton does.
_EITHER: Final = 32 + zlib.MAX_WBITS
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def decompress(body: Buffer, encoding: str, limit: int) -> Buffer:
    """The body as it was before ``encoding`` (the value of ``Content-Encoding``, empty for none).

    Raises UNSUPPORTED for an unknown encoding, INVALID_ARG for more than ``limit`` bytes and for
    data that is damaged, cut short or followed by something else.
    """
    if is_identity(encoding):
        return body
    data = decompress_at_most(body, encoding, limit)
    if data is None:
        raise invalid(
            f"Decompressed data size exceeds the maximum allowed value of {limit} bytes."
            " Use --http-max-input-size to increase the limit."
        )
    return data


def is_identity(encoding: str) -> bool:
    """Whether ``Content-Encoding`` leaves a body as it is."""
    return encoding.strip().lower() in ("", "identity")


def decompress_at_most(body: Buffer, encoding: str, limit: int) -> bytes | None:
    """A compressed body as it was, None for more than ``limit`` bytes.  Raises as :func:`decompress` does."""
    encoding = encoding.strip().lower()
    if encoding not in _WINDOW_BITS:
        raise unsupported(UNSUPPORTED_COMPRESSION)
    if not len(body):
        raise invalid("nothing to be decompressed")
    decompressor = zlib.decompressobj(_EITHER)
    try:
        # One byte more than allowed is enough to know that there is more.
        data = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(f"failed to decompress the request body ({encoding}): {error}") from None
    if len(data) > limit:
        return None
    if not decompressor.eof:
        raise invalid(f"failed to decompress the request body ({encoding}): it is cut short")
    if decompressor.unused_data:
        raise invalid(f"failed to decompress the request body ({encoding}): other data follows it")
    return data


def check_identity(encoding: str) -> None:
    """Raise INVALID_ARG for compressed bodies of ``generate`` and ``generate_stream``, as Triton does."""
    if encoding != "identity":
        raise invalid("Unsupported content-encoding, only 'identity' is supported.")


def negotiate(accept: str) -> str:
    """The encoding for a response by the request's ``Accept-Encoding``: ``gzip``, ``deflate`` or ``identity``.

    The one of highest weight wins, of equal ones the first; without a match nothing is compressed.
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
    """A response's body, given in parts, compressed with ``gzip`` or ``deflate``."""
    compressor = zlib.compressobj(wbits=_WINDOW_BITS[encoding])
    chunks = [compressor.compress(part) for part in parts]
    chunks.append(compressor.flush())
    return b"".join(chunks)
