"""Reads ``multipart/form-data`` bodies (RFC 7578), as clients send files.

Does no I/O; runs on the event loop, or in an offloading process for large bodies. The parts are views of the body.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from conch.core.errors import clipped, invalid
from conch.core.tensors import Buffer

#: Maximum number of parts of a body.
MAX_PARTS: Final = 64
#: Maximum size of the headers of a part (bytes).
_MAX_HEADERS: Final = 8 << 10

#: The boundary, in quotes or not (RFC 2046, section 5.1.1).
_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_PARAMETER: Final = re.compile(r';\s*([\w*-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))\s*')
_ESCAPED: Final = re.compile(r'\\(["\\])')
_IDENTITY: Final = ("", "binary", "8bit", "7bit")


class FormPart(NamedTuple):
    """A part of a form: the name of its field, the name of its file (None for a text), and its content."""

    name: str
    filename: str | None
    content: memoryview


def read_form(body: Buffer, content_type: str) -> list[FormPart]:
    """Return the parts of a body. Raises INVALID_ARG unless ``content_type`` and the body are a complete form."""
    kind, _, _ = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise invalid(f"the content type is '{clipped(content_type)}'; it must be multipart/form-data")
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise invalid("the content type has no boundary of 1 to 70 characters")
    opening = b"--" + (boundary[1] or boundary[2]).encode("latin-1")
    view = memoryview(body)
    start = 2 if bytes(view[:2]) == b"\r\n" else 0
    position = start + len(opening)
    if view[start:position] != opening:
        raise invalid("the body does not begin with the boundary of its content type")
    delimiter = re.compile(re.escape(b"\r\n" + opening))
    parts: list[FormPart] = []
    while (following := bytes(view[position : position + 2])) != b"--":
        if following != b"\r\n":
            raise invalid("a boundary of the body is not followed by the end of a line")
        if len(parts) == MAX_PARTS:
            raise invalid(f"the body has more than {MAX_PARTS} parts")
        # The line break before a part without headers is also the one before its content.
        end = delimiter.search(view, position)
        if end is None:
            raise invalid("the body ends before its last boundary")
        parts.append(_part(view[position : end.start()]))
        position = end.end()
    return parts


def _part(data: memoryview) -> FormPart:
    """Return the part with the headers and content in ``data``, which begins with a line break."""
    head, blank, _ = bytes(data[: _MAX_HEADERS + 4]).partition(b"\r\n\r\n")
    if not blank:
        raise invalid(f"the headers of a part of the body do not end within {_MAX_HEADERS} bytes")
    headers: dict[str, str] = {}
    for line in head.split(b"\r\n")[1:]:
        name, colon, value = _text(line).partition(":")
        if not colon or name.lower() in headers:
            raise invalid("a part of the body has invalid headers")
        headers[name.lower()] = value.strip()
    encoding = headers.get("content-transfer-encoding", "").lower()
    if encoding not in _IDENTITY:
        raise invalid(f"the transfer encoding '{clipped(encoding)}' of a part is not supported; send its bytes")
    parameters = _parameters(headers.get("content-disposition", ""))
    if not parameters.get("name"):
        raise invalid("a part of the body has no name")
    return FormPart(parameters["name"], parameters.get("filename"), data[len(head) + 4 :])


def _parameters(disposition: str) -> dict[str, str]:
    """Return the parameters of ``Content-Disposition``."""
    kind, _, _ = disposition.partition(";")
    position = len(kind)
    parameters: dict[str, str] = {}
    while kind.strip().lower() == "form-data" and position < len(disposition):
        match = _PARAMETER.match(disposition, position)
        if match is None or match[1].lower() in parameters:
            break
        value = match[3] if match[2] is None else _ESCAPED.sub(r"\1", match[2])
        parameters[match[1].lower()] = value
        position = match.end()
    else:
        if parameters:
            return parameters
    raise invalid(f"the content disposition of a part is '{clipped(disposition)}'; it must be form-data with a name")


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise invalid("a part of the body has headers that are not UTF-8") from None
