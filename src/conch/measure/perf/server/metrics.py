"""Samples the server's CPU and GPU metrics during a measurement; the server may be on another machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Final

from conch.client.http import fetch
from conch.core.errors import ConchError, invalid, unavailable
from conch.measure.perf.senders.records import Span
from conch.measure.perf.server.resources import MetricFigures
from conch.measure.perf.server.sampling import Sampler

#: The gauges that are read. perf_analyzer reads those of GPUs.
GAUGES: Final = (
    "nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes", "nv_gpu_power_usage",
    "nv_cpu_utilization", "nv_cpu_memory_used_bytes",
)  # fmt: skip
_LINE: Final = re.compile(r"^(\w+(?:\{[^}]*\})?)\s+(\S+)")
_SECONDS: Final = 5.0


class MetricsSampler(Sampler[Mapping[str, float]]):
    """Reads ``url`` every ``interval`` seconds while the context is entered.

    Raises INVALID_ARG if none of the gauges is present. A later failure leaves a gap in the samples.
    """

    def __init__(self, url: str, interval: float) -> None:
        super().__init__(self._read_or_nothing, interval)
        self._url = with_scheme(url)
        try:
            gauges = self._scrape()
        except ConchError as error:
            raise invalid(f"no metrics at {self._url}: {error} (--metrics-url names another place)") from None
        if not gauges:
            raise invalid(f"{self._url} has no {GAUGES[0]}, nor any other of: {', '.join(GAUGES[1:])}")

    def figures(self, spans: Sequence[Span]) -> dict[str, MetricFigures]:
        """Return the average and maximum of each gauge, by name with labels, in the windows ``spans``."""
        values: dict[str, list[float]] = {}
        for sample in self.within(spans):
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
        return {name: MetricFigures(fmean(samples), max(samples)) for name, samples in values.items()}

    def _scrape(self) -> Mapping[str, float]:
        return read_gauges(read_page(self._url, _SECONDS))

    def _read_or_nothing(self) -> Mapping[str, float]:
        with suppress(ConchError):
            return self._scrape()
        return {}


def with_scheme(url: str) -> str:
    """Return the URL of a metrics page, with ``http`` as the default scheme."""
    return url if "://" in url else f"http://{url}"


def read_page(url: str, timeout: float) -> str:
    """Return the text of a metrics page.  Raises ConchError."""
    status, body = fetch(url, timeout)
    if status != 200:
        raise unavailable(f"HTTP status {status}")
    return body.decode("utf-8", "replace")


def read_gauges(text: str) -> dict[str, float]:
    """Return the gauges in a text of the Prometheus format, by name with labels as written."""
    gauges = {}
    for line in text.splitlines():
        sample = _LINE.match(line)
        if sample and sample[1].partition("{")[0] in GAUGES:
            gauges[sample[1]] = float(sample[2])
    return gauges
