"""Forms: those that clients send, and bodies that are no forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import Code, ConchError
from conch.wire.multipart import MAX_PARTS, read_form

TYPE = "multipart/form-data; boundary=edge"


def part(name: str, content: bytes = b"x", more: str = "") -> bytes:
    return f"--edge\r\nContent-Disposition: form-data; {name}{more}\r\n\r\n".encode() + content + b"\r\n"


def test_parts_keep_their_order_and_every_byte() -> None:
    body = part('name="a"', b"\r\n--edg\r\n\r\n") + part('name="a"', b"") + b"--edge--\r\nafter the end"
    assert [(name, file, bytes(content)) for name, file, content in read_form(body, TYPE)] == [
        ("a", None, b"\r\n--edg\r\n\r\n"), ("a", None, b""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("disposition", "name", "filename"),
    [
        ('name="file"; filename="a \\"b\\".wav"', "file", 'a "b".wav'),
        ('filename="a; name=other.wav"; name="file"', "file", "a; name=other.wav"),
        ("name=file; filename=a.wav", "file", "a.wav"),
        ('name="fi\\\\le"; filename="C:\\\\a.wav"', "fi\\le", "C:\\a.wav"),
        ('name="é"; filename=""', "é", ""),
        ("name=\"a\"; filename*=UTF-8''b.wav", "a", None),
    ],
)
def test_names_are_read_with_their_quotes(disposition: str, name: str, filename: str | None) -> None:
    (read,) = read_form(part(disposition) + b"--edge--", TYPE)
    assert read[:2] == (name, filename)


@pytest.mark.parametrize(
    "content_type", ['multipart/form-data; boundary="a b"', "Multipart/Form-Data;boundary=edge;x=y"]
)
def test_boundary_is_read_from_the_content_type(content_type: str) -> None:
    edge = b"a b" if "a b" in content_type else b"edge"
    assert read_form(b"\r\n--%b--" % edge, content_type) == []


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("application/json", b"{}", "must be multipart/form-data"),
        ("multipart/form-data", part('name="a"'), "has no boundary"),
        (f"multipart/form-data; boundary={'x' * 71}", b"", "has no boundary"),
        (TYPE, b"", "does not begin with the boundary"),
        (TYPE, b"text\r\n--edge--", "does not begin with the boundary"),
        (TYPE, b"--edgewise", "not followed by the end of a line"),
        (TYPE, part('name="a"'), "not followed|ends before"),
        (TYPE, part('name="a"')[:-8], "ends before its last boundary"),
        (TYPE, b"--edge\r\n--edge--", "the headers of a part of the body do not end"),
        (TYPE, b"--edge\r\n\r\n\r\n--edge--", "must be form-data with a name"),
        (TYPE, b"--edge\r\nX: " + b"x" * 9000 + b"\r\n\r\n\r\n--edge--", "do not end within 8192"),
        (TYPE, part("filename=a") + b"--edge--", "has no name"),
        (TYPE, part('name=""') + b"--edge--", "has no name"),
        (TYPE, part('name="a') + b"--edge--", "must be form-data with a name"),
        (TYPE, part('name="a"; name="b"') + b"--edge--", "must be form-data with a name"),
        (TYPE, part('name="a"').replace(b"form-data", b"attachment") + b"--edge--", "must be form-data"),
        (TYPE, part('name="a"', more="\r\nContent-Transfer-Encoding: base64") + b"--edge--", "send its bytes"),
        (TYPE, part('name="a"', more="\r\nContent-Disposition: form-data") + b"--edge--", "invalid headers"),
        (TYPE, part('name="a"', more="\r\nnothing") + b"--edge--", "invalid headers"),
        (TYPE, part('name="a"').replace(b"a", b"\xff") + b"--edge--", "not UTF-8"),
        (TYPE, part('name="a"') * (MAX_PARTS + 1) + b"--edge--", f"more than {MAX_PARTS} parts"),
        (TYPE, part('name="a"') * 5000, f"more than {MAX_PARTS} parts"),
    ],
)
def test_body_that_is_no_form_is_refused(content_type: str, body: bytes, message: str) -> None:
    with pytest.raises(ConchError, match=message) as refused:
        read_form(body, content_type)
    assert refused.value.code is Code.INVALID_ARG


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_give_parts_or_an_error(data: bytes, cut: int) -> None:
    whole = part('name="a"', data)
    for body in (data, whole[:cut] + data, whole + b"--edge" + data):
        try:
            parts = read_form(body, TYPE)
        except ConchError as error:
            assert error.code is Code.INVALID_ARG
        else:
            assert all(part.name for part in parts)
