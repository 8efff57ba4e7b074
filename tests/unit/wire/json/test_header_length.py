"""The header that says where the JSON of a body ends."""

from __future__ import annotations

import pytest

from conch.core.errors import Code, ConchError
from conch.wire.json.infer import parse_header_length


@pytest.mark.parametrize(
    ("value", "length"), [(None, None), (b"0", 0), (b"5", 5), (b" 5 ", 5), (b"+5", 5), (b"10", 10)]
)
def test_header_length_is_read(value: bytes | None, length: int | None) -> None:
    assert parse_header_length(value, 10) == length


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        (b"", "Unable to parse Inference-Header-Content-Length, got: "),
        (b"1_0", "Unable to parse Inference-Header-Content-Length, got: 1_0"),
        (b"\xb2", "Unable to parse Inference-Header-Content-Length, got: \xb2"),
        (b"-1", "inference header size should be in range (0, 10), got: -1"),
        (b"11", "inference header size should be in range (0, 10), got: 11"),
        (
            b"2147483648",
            "Unable to parse Inference-Header-Content-Length, value is out of range"
            " [ -2147483648, 2147483647 ], got: 2147483648",
        ),
    ],
)
def test_bad_header_length_is_refused(value: bytes, message: str) -> None:
    with pytest.raises(ConchError) as caught:
        parse_header_length(value, 10)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, message)
