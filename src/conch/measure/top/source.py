"""Reads a server's metrics page, repository index and configurations over HTTP. Blocks; called in a thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from conch.client.deadline import Deadline
from conch.client.http import HttpTransport
from conch.core.errors import ConchError, invalid
from conch.machine.ports import host_and_port
from conch.measure.metrics_page import read_page, with_scheme
from conch.measure.top.counts import ServerCounts, read_counts

_SECONDS: Final = 5.0
#: The number of configurations that one reading requests.
_CONFIGS: Final = 20


class TopReading(NamedTuple):
    """The state of a server at ``time`` (s, monotonic).

    ``server`` is its name and version, ``models`` its repository index, ``instances`` their number by model.
    """

    time: float
    server: str
    counts: ServerCounts
    models: list[dict[str, str]]
    instances: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TopAddress:
    """The URLs of a server, and the headers of requests to its HTTP port."""

    url: str
    metrics_url: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, url: str, metrics_url: str, headers: Mapping[str, str]) -> TopAddress:
        """Complete the URLs: metrics are at port 8002 of the same host by default. Raises INVALID_ARG."""
        url, metrics_url = with_scheme(url), with_scheme(metrics_url) if metrics_url else ""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 8000
            path = urlsplit(metrics_url).path
        except ValueError:
            host = None
        if not host:
            raise invalid(f"'{url}' is not the address of a server, such as localhost:8000")
        if not metrics_url:
            metrics_url = f"http://{host_and_port(host, 8002)}"
        if path in ("", "/"):
            metrics_url = f"{metrics_url.rstrip('/')}/metrics"
        return cls(f"{parts.scheme}://{host_and_port(host, port)}{parts.path.rstrip('/')}", metrics_url, headers)


class ServerSource:
    """Reads the server at ``address``; the number of instances of each model is read once."""

    def __init__(self, address: TopAddress) -> None:
        self._address = address
        parts = urlsplit(address.url)
        assert parts.hostname is not None and parts.port is not None
        tls = None
        if parts.scheme == "https":
            import ssl

            tls = ssl.create_default_context()
        self._transport = HttpTransport(parts.hostname, parts.port, parts.path, tls, address.headers)
        self._server = ""
        self._instances: dict[str, int] = {}

    def read(self) -> TopReading:
        """Read everything. Raises ConchError without a metrics page; without an HTTP port, the rest is empty."""
        counts = read_counts(read_page(self._address.metrics_url, _SECONDS))
        now = monotonic()
        index: list[dict[str, str]] = []
        try:
            index = self._transport.index(Deadline.after(_SECONDS))
            if not self._server:
                metadata = self._transport.metadata("", -1, Deadline.after(_SECONDS))
                self._server = f"{metadata.get('name', '')} {metadata.get('version', '')}".strip()
            self._read_instances({name for name, _ in counts.models})
        except (ConchError, json.JSONDecodeError):
            pass  # no HTTP port, a restricted API, or an unknown key: the metrics page suffices
        return TopReading(now, self._server, counts, index, dict(self._instances))

    def forget(self) -> None:
        """Forget the data that are read once, because the server has ended: another may replace it."""
        self._server = ""
        self._instances = {}

    def close(self) -> None:
        self._transport.close()

    def _read_instances(self, models: set[str]) -> None:
        for name in self._instances.keys() - models:
            del self._instances[name]  # read again after a reload
        for name in sorted(models - self._instances.keys())[:_CONFIGS]:
            config: Any = self._transport.config(name, -1, Deadline.after(_SECONDS))
            groups = config.instance_group
            self._instances[name] = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in groups)
