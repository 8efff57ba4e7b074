"""``conch top``: the models of a running server, in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Final

from conch.cli.options import command_of
from conch.core.errors import invalid
from conch.machine.extras import require
from conch.options.declaration import Range, option

_SECTION: Final = "Options"
Seconds = Annotated[float, Range(0.2, 3600)]


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """The options of ``conch top``."""

    # fmt: off
    url: str = option("localhost:8000", _SECTION, "Address of the server's HTTP port.", flags=("-u", "--url"))
    metrics_url: str = option("", _SECTION, "URL of its metrics page (default: port 8002 of the same host).")
    interval: Seconds = option(1.0, _SECTION, "Seconds between readings.")
    header: tuple[str, ...] = option(
        (), _SECTION, "Header of requests, such as 'Authorization: Bearer KEY'; repeatable.", flags=("-H", "--header")
    )
    # fmt: on


def _top(options: TopOptions) -> None:
    """Show the models of a conch or Triton server: requests, latency, queues, failures and memory."""
    require("conch top", "textual", extra="terminal")
    from conch.measure.top.screen import TopApp
    from conch.measure.top.source import ServerSource, TopAddress

    headers = dict(_header(text) for text in options.header)
    address = TopAddress.of(options.url, options.metrics_url, headers)
    if not sys.stdout.isatty():
        raise invalid("conch top needs a terminal")
    source = ServerSource(address)
    try:
        TopApp(source, address.url.partition("://")[2], options.interval).run()
    finally:
        source.close()


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise invalid(f"--header is <name>: <value>; got '{text}'")
    return name.strip(), value.strip()


top_command = command_of("top", TopOptions, _top)
