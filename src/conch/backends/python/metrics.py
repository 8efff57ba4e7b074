"""``pb_utils.MetricFamily`` and its metrics: custom metrics of a model on the server's metrics page.

The server stores the values, because models and instances share them; families and metrics are created and read by
calls to the server. Changes are accumulated in the worker and sent before the next frame, for example before the
response to the request that made them. If no frame follows soon, a thread sends them. Runs in the worker of a Python
model, in any of its threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from enum import Enum
from itertools import count
from math import isfinite
from time import sleep
from typing import Any
from weakref import ref

from conch.backends.python.errors import TritonModelException
from conch.backends.python.runtime import Runtime, current
from conch.workers.child.channel import Channel, Header
from conch.workers.child.forked import ForkedChannel

#: Time after which changes are sent without waiting for another frame (s).
FLUSH_SECONDS = 0.05

_OP = "metric_control"
_CREATING = "Error when creating Metric"
_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should "
    "be deleted AFTER its corresponding 'Metric' objects have been deleted."
)


class MetricKind(Enum):
    """The type of a family's metrics, as on the metrics page."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricFamily:
    """A family of metrics, shared by all models that use the same name.

    When this object is deleted, the family and the metrics created by it are removed from the metrics page, unless
    other objects refer to them.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not isinstance(name, str) or not isinstance(description, str) or not isinstance(kind, MetricKind):
            raise TypeError(
                "MetricFamily(name: str, description: str, kind: MetricFamily.COUNTER, GAUGE or HISTOGRAM) does not "
                f"take {name!r}, {description!r}, {kind!r}"
            )
        self._kind = kind
        self._runtime = current()
        self._number = 0  # until the server has created the family
        number = next(_numbers)
        fields: Header = {
            "op": _OP,
            "do": "family",
            "number": number,
            "name": name,
            "description": description,
            "kind": kind.name,
        }
        self._runtime.ask("Error when creating MetricFamily", fields)
        self._number = number

    def __del__(self) -> None:
        if getattr(self, "_number", 0):
            self._runtime.channel.post({"op": "metrics_drop", "family": self._number})

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> CustomMetric:
        """Create the metric with these labels; ``buckets`` are the ascending upper bounds of a histogram's buckets."""
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        for key, value in (labels or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise TritonModelException(
                    f"Failed to create metric. Labels must be texts by name, found {key!r}: {value!r}."
                )
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind is MetricKind.HISTOGRAM and buckets is None:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if self._kind is not MetricKind.HISTOGRAM and buckets:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        bounds = [_number(bound) for bound in buckets or ()]
        if any(not low < high for low, high in zip(bounds, bounds[1:])) or any(bound != bound for bound in bounds):
            raise self._runtime.failure(_CREATING, "Bucket Boundaries must be strictly sorted")
        number = next(_numbers)
        fields: Header = {"op": _OP, "do": "series", "number": number, "family": self._number, "labels": labels or {}}
        fields["bounds"] = [_portable(bound) for bound in bounds]
        response = self._runtime.ask(_CREATING, fields)
        # A histogram that other models or instances hold already keeps its buckets.
        return CustomMetric(self, number, [float(bound) for bound in response._parameters["bounds"]])


class CustomMetric:
    """One counter, gauge or histogram of a family; created by :meth:`MetricFamily.Metric`."""

    __slots__ = ("__weakref__", "_bounds", "_change", "_family", "_kind", "_number", "_runtime")

    def __init__(self, family: MetricFamily, number: int, bounds: list[float]) -> None:
        self._family = ref(family)
        self._kind = family._kind
        self._runtime = family._runtime
        self._number = number
        self._bounds = bounds
        #: The change that has not been sent to the server (see ``MetricChanges``); None if there is none.
        self._change: MetricChange | None = None

    def __del__(self) -> None:
        # Unsent changes hold a reference to the metric, so none are left here.
        if self._family() is not None:
            self._runtime.channel.post({"op": "metrics_drop", "series": self._number})

    def increment(self, value: float) -> None:
        """Add ``value`` to a counter or a gauge; it must not be negative for a counter."""
        amount = self._check("increment", "Increment", value, MetricKind.HISTOGRAM)
        if self._kind is MetricKind.COUNTER and not amount >= 0:
            raise self._refused("increment", "can only be incremented monotonically by non-negative values.")
        _changes_of(self._runtime).add(self, amount)

    def set(self, value: float) -> None:
        """Set a gauge."""
        amount = self._check("set", "Set", value, MetricKind.HISTOGRAM, MetricKind.COUNTER)
        _changes_of(self._runtime).set(self, amount)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        amount = self._check("observe", "Observe", value, MetricKind.COUNTER, MetricKind.GAUGE)
        _changes_of(self._runtime).observe(self, bisect_left(self._bounds, amount), amount)

    def value(self) -> float:
        """Return the value of a counter or a gauge, including changes by other models and instances."""
        self._check("get", "Value", 0, MetricKind.HISTOGRAM)
        header = {"op": _OP, "do": "value", "number": self._number}
        response = self._runtime.ask("Failed to get metric value", header)
        return float(response._parameters["value"])

    def _check(self, verb: str, operation: str, value: Any, *without: MetricKind) -> float:
        number = _number(value)
        if self._family() is None:
            raise TritonModelException(f"Failed to {verb} metric value: {_DELETED}")
        if self._kind in without:
            raise self._refused(verb, f"does not support {operation}")
        return number

    def _refused(self, verb: str, why: str) -> TritonModelException:
        kind = f"TRITONSERVER_METRIC_KIND_{self._kind.name}"
        return self._runtime.failure(f"Failed to {verb} metric value", f"{kind} {why}")


class MetricChange:
    """A change of a metric: set to ``amount`` (``absolute``) or changed by it; and increments by bucket index."""

    __slots__ = ("absolute", "amount", "buckets")

    def __init__(self) -> None:
        self.absolute = False
        self.amount = 0.0
        self.buckets: dict[int, int] = {}


class MetricChanges:
    """The changes of a worker's metrics that have not been sent to the server; created at the first change."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed: list[CustomMetric] = []
        self._changing = threading.Lock()
        self._waiting = threading.Event()
        self._closed = False
        channel.ahead = self.take
        self._thread = threading.Thread(target=self._send_late, name="conch-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._waiting.set()
        self._thread.join()

    def add(self, metric: CustomMetric, amount: float) -> None:
        with self._changing:
            self._change_of(metric).amount += amount

    def set(self, metric: CustomMetric, amount: float) -> None:
        with self._changing:
            change = self._change_of(metric)
            change.absolute, change.amount = True, amount

    def observe(self, metric: CustomMetric, bucket: int, amount: float) -> None:
        with self._changing:
            change = self._change_of(metric)
            change.amount += amount
            change.buckets[bucket] = change.buckets.get(bucket, 0) + 1

    def take(self) -> Header | None:
        """Return a frame with all unsent changes; None if there are none. The channel calls it before each frame."""
        if not self._changed:
            return None
        with self._changing:
            changed, self._changed = self._changed, []
            series = []
            for metric in changed:
                change, metric._change = metric._change, None
                if change is not None:
                    buckets = list(change.buckets.items())
                    series.append([metric._number, change.absolute, _portable(change.amount), buckets])
        return {"op": "metrics", "series": series}

    def _change_of(self, metric: CustomMetric) -> MetricChange:
        change = metric._change
        if change is None:
            change = metric._change = MetricChange()
            self._changed.append(metric)
            if len(self._changed) == 1:
                self._waiting.set()
        return change

    def _send_late(self) -> None:
        while True:
            self._waiting.wait()
            if self._closed:
                return
            self._waiting.clear()
            sleep(FLUSH_SECONDS)
            self._channel.send_ahead()


#: Numbers of families and metrics in frames.
_numbers = count(1)
_making_changes = threading.Lock()


def _changes_of(runtime: Runtime) -> MetricChanges:
    changes: MetricChanges | None = runtime.metric_changes
    if isinstance(runtime.channel, ForkedChannel):
        raise runtime.channel.refusal()
    if changes is None:
        with _making_changes:
            changes = runtime.metric_changes
            if changes is None:
                changes = runtime.metric_changes = MetricChanges(runtime.channel)
    return changes


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"a metric takes numbers, not {value!r}")
    return float(value)


def _portable(value: float) -> float | str:
    """Convert a number for JSON, which has no infinity and no NaN."""
    return value if isfinite(value) else repr(value)
