"""Handles the custom metrics of a worker: creation, changes and queries.

The server's side of ``conch.backends.python.metrics``; runs on the event loop. When the worker ends, metrics that no
other worker uses are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from conch.core.errors import ConchError, internal
from conch.telemetry.custom import MetricsHolder
from conch.workers.child.channel import Header


class MetricsHandler:
    """Handles the custom metrics of one worker; ``send`` writes a frame to the worker."""

    def __init__(self, holder: MetricsHolder, send: Callable[[Header], None]) -> None:
        self._holder = holder
        self._send = send

    def handle(self, header: Header) -> bool:
        """Handle a metrics frame; return False for other frames. Malformed ones raise LookupError or ValueError."""
        match header["op"]:
            case "metrics":
                for number, absolute, amount, buckets in header["series"]:
                    self._holder.change(number, absolute, float(amount), buckets)
            case "metrics_drop" if "series" in header:
                self._holder.drop_series(header["series"])
            case "metrics_drop":
                self._holder.drop_family(header["family"])
            case "metric_control":
                self._answer(header)
            case _:
                return False
        return True

    def close(self) -> None:
        """Release all metrics because the worker has ended."""
        self._holder.close()

    def _answer(self, header: Header) -> None:
        answer: Header = {"op": "answer", "call": header["call"], "outputs": [], "parameters": {}, "final": True}
        try:
            answer["parameters"] = self._do(header)
        except ConchError as error:
            answer["error"] = [error.code.name, error.message]
        self._send(answer)

    def _do(self, header: Header) -> Header:
        number = header["number"]
        match header["do"]:
            case "family":
                self._holder.add_family(number, header["name"], header["description"], header["kind"])
            case "series":
                bounds = [float(bound) for bound in header["bounds"]]
                self._holder.add_series(number, header["family"], header["labels"], bounds)
            case "value":
                value = self._holder.value(number)
                return {"value": value if isfinite(value) else repr(value)}
            case other:
                raise internal(f"metrics have no '{other}'")
        return {}
