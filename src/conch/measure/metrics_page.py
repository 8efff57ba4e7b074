"""Reads the metrics pages of servers, in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from conch.client.http import fetch
from conch.core.errors import unavailable

_LINE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


def with_scheme(url: str) -> str:
    """Return the URL of a metrics page, with ``http`` as the default scheme."""
    return url if "://" in url else f"http://{url}"


def read_page(url: str, timeout: float) -> str:
    """Return the text of a metrics page. Raises ConchError."""
    status, body = fetch(url, timeout)
    if status != 200:
        raise unavailable(f"HTTP status {status}")
    return body.decode("utf-8", "replace")


def samples(page: str) -> Iterator[tuple[str, str, float]]:
    """Yield the name, the labels as written, and the value of each sample; other lines are ignored."""
    for name, labels, value in _LINE.findall(page):
        try:
            number = float(value)
        except ValueError:
            continue
        yield name, labels, number


def labels_of(text: str) -> dict[str, str]:
    """Return labels by name."""
    return {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
