"""Compressed bodies and the choice of an encoding."""

from __future__ import annotations

import gzip
import zlib

import pytest

from conch.core.errors import Code, ConchError
from conch.wire.compression import check_identity, compress, decompress, negotiate

TEXT = b"some text " * 100


def refusal(body: bytes, encoding: str, limit: int = 10_000) -> tuple[Code, str]:
    with pytest.raises(ConchError) as caught:
        decompress(body, encoding, limit)
    return caught.value.code, caught.value.message


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_body_is_restored(encoding: str) -> None:
    assert decompress(gzip.compress(TEXT), encoding, len(TEXT)) == TEXT
    assert decompress(zlib.compress(TEXT), encoding, len(TEXT)) == TEXT
    assert decompress(memoryview(compress([TEXT[:7], TEXT[7:]], encoding)), encoding, len(TEXT)) == TEXT


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_plain_body_is_not_touched(encoding: str) -> None:
    assert decompress(TEXT, encoding, 1) is TEXT


def test_unknown_encoding_is_refused() -> None:
    assert refusal(TEXT, "br") == (Code.UNSUPPORTED, "Unsupported compression type")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bomb_is_refused_before_it_grows(encoding: str) -> None:
    bomb = compress([bytes(1 << 26)], encoding)
    assert len(bomb) < 100_000
    assert refusal(bomb, encoding, 1000) == (
        Code.INVALID_ARG,
        "Decompressed data size exceeds the maximum allowed value of 1000 bytes."
        " Use --http-max-input-size to increase the limit.",
    )


def test_one_byte_more_than_allowed_is_too_much() -> None:
    assert refusal(gzip.compress(TEXT), "gzip", len(TEXT) - 1)[1].startswith("Decompressed data size exceeds")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "nothing to be decompressed"),
        (TEXT, "incorrect header check"),
        (gzip.compress(TEXT)[:-20], "it is truncated"),
        (gzip.compress(TEXT)[:-4], "it is truncated"),
        (gzip.compress(TEXT) + b"more", "other data follows it"),
        (gzip.compress(TEXT)[:-8] + bytes(8), "incorrect data check"),
    ],
)
def test_damaged_body_is_refused(body: bytes, reason: str) -> None:
    code, message = refusal(body, "gzip")
    assert code is Code.INVALID_ARG and message.endswith(reason)


def test_generate_takes_no_compressed_bodies() -> None:
    check_identity("identity")
    for encoding in ("gzip", ""):
        with pytest.raises(ConchError, match="Unsupported content-encoding, only 'identity' is supported"):
            check_identity(encoding)


# As Triton 2.51 chooses, but for upper case, blanks and bad weights.
@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("", "identity"),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("identity, gzip", "identity"),
        ("gzip;q=0.5,identity", "identity"),
        ("gzip;q=0", "identity"),
        ("gzip;q=x", "identity"),
        ("gzip;q=1;x=2", "gzip"),
        ("*", "identity"),
        ("br, GZIP ; q=0.5", "gzip"),
    ],
)
def test_encoding_of_highest_weight_is_chosen(accept: str, encoding: str) -> None:
    assert negotiate(accept) == encoding
