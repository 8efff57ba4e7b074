"""Trace settings, global and per model, and the selection of requests to trace.

The application makes one ``Tracing`` from the options. Front ends first check ``on``, the only cost of disabled
tracing, and begin traces with :meth:`Tracing.begin`. Clients read and change the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from conch.core.inference import InferRequest
from conch.machine.extras import require
from conch.telemetry.tracing.files import TraceFile
from conch.telemetry.tracing.parents import caller_of
from conch.telemetry.tracing.trace import FrontendMoments, Trace, TracedRequest
from conch.telemetry.tracing.values import OwnValues, TraceChanges, TraceValues

if TYPE_CHECKING:
    from conch.telemetry.tracing.collector import Collector


class TraceSink(Protocol):
    """A destination of finished traces: a file, or a collector."""

    def append(self, traces: Sequence[Trace]) -> None: ...

    def write_numbered(self, traces: Sequence[Trace]) -> None: ...

    def close(self) -> None: ...


class Sampling:
    """Counts requests and traces of one setting until the setting is changed.

    Traces that began under a setting also end under it: after :meth:`retire`, kept traces are written as soon as the
    last of them has ended.
    """

    def __init__(self, values: TraceValues, sink: TraceSink) -> None:
        self.values = values
        self._sink = sink
        self._possible = not values.problem
        self._left = values.count
        self._seen = 0
        self._collected = 0
        self._open = 0
        self._kept: list[Trace] = []
        self._retired = False

    @property
    def active(self) -> bool:
        """Whether any request may be traced."""
        return self._possible and self._left != 0

    @property
    def shown(self) -> TraceValues:
        """The values with the remaining number of traces."""
        return replace(self.values, count=self._left)

    def takes(self, forced: bool) -> bool:
        """Return whether to trace the next request: every ``rate``-th, and each that its caller traces (``forced``)."""
        if not self.active:
            return False
        self._seen += 1
        if self._seen % self.values.rate and not forced:
            return False
        if self._left > 0:
            self._left -= 1
        self._open += 1
        return True

    def ended(self, trace: Trace) -> None:
        """Keep a finished trace and write kept ones: ``log_frequency`` per numbered file, or all after the last."""
        self._open -= 1
        self._kept.append(trace)
        self._collected += 1
        frequency = self.values.log_frequency
        if self.values.mode == "opentelemetry":
            self._write(self._sink.append)
        elif (not self._left and self._collected == self._seen) or (frequency and len(self._kept) >= frequency):
            self._write(self._sink.write_numbered)
        self._end_if_over()

    def retire(self) -> None:
        """Mark this setting as replaced: write kept traces once no traced request is in flight."""
        self._retired = True
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._retired and not self._open and self._kept:
            self._write(self._sink.write_numbered if self.values.log_frequency else self._sink.append)

    def _write(self, write: Callable[[Sequence[Trace]], None]) -> None:
        kept, self._kept = self._kept, []
        write(kept)


class Tracing:
    """The trace settings of a server. ``sink`` receives the traces; the default comes from ``startup``.

    Raises UNSUPPORTED if a collector is configured and OpenTelemetry is not installed.
    """

    def __init__(self, startup: TraceValues, sink: TraceSink | None = None) -> None:
        self._startup = startup
        self._collector: Collector | None = _collector(startup)
        self._sink: TraceSink = sink or self._collector or TraceFile(startup.file)
        self._own = OwnValues()
        self._own_of_models: dict[str, OwnValues] = {}
        self._global = Sampling(startup, self._sink)
        self._of_models: dict[str, Sampling] = {}
        #: Whether any request may be traced.
        self.on = self._global.active

    def begin(
        self, request: InferRequest, frontend: FrontendMoments, began: int, headers: Mapping[str, str] | None = None
    ) -> None:
        """Begin a trace of a request before it is passed to its model, if sampling selects it.

        ``began`` is when the request began to arrive; ``headers`` contains ``traceparent`` and ``tracestate``, if sent.
        """
        sampling = self._of_models.get(request.model_name, self._global)
        caller = caller_of(headers) if self._collector is not None and headers else None
        if not sampling.takes(forced=caller is not None):
            return
        collector = self._collector
        trace = Trace(
            sampling.values.level,
            sampling.ended,
            collector.new_context(caller) if collector is not None else None,
        )
        request.trace = traced = TracedRequest(trace, frontend=frontend)
        traced.begin()
        for name, ns in zip(frontend.received, (began, request.times.arrived), strict=True):
            traced.mark(name, ns)

    def shown(self, model: str = "") -> dict[str, Any]:
        """Return the setting of a model, or with an empty name the global one, as clients see it."""
        return self._of_models.get(model, self._global).shown.shown()

    def update(self, model: str, changes: TraceChanges) -> None:
        """Change the setting of a model, or with an empty name the global one and models' fields that fall back to it.

        A field that is None is cleared. Raises INVALID_ARG, and changes nothing, for values that enable tracing but
        cannot trace.
        """
        if model:
            own = self._own_of_models.get(model, OwnValues()).changed(changes)
            self._set_model(model, own, own.over(self._global.shown))
        else:
            own = self._own.changed(changes)
            values = own.over(self._startup)
            of_models = {name: theirs.over(values) for name, theirs in self._own_of_models.items()}
            self._own = own
            self._global.retire()
            self._global = Sampling(values, self._sink)
            for name, theirs in of_models.items():
                self._set_model(name, self._own_of_models[name], theirs)
        self.on = any(tracer.active for tracer in (self._global, *self._of_models.values()))

    def close(self) -> None:
        """Write kept traces and finish the files. Call when no request is in flight, not on the event loop."""
        for sampling in (self._global, *self._of_models.values()):
            sampling.retire()
        self._sink.close()

    def _set_model(self, model: str, own: OwnValues, values: TraceValues) -> None:
        current = self._of_models.pop(model, None)
        if current is not None:
            current.retire()
        self._own_of_models.pop(model, None)
        if not own.empty:
            self._own_of_models[model] = own
            self._of_models[model] = Sampling(values, self._sink)


def _collector(values: TraceValues) -> Collector | None:
    """Return the collector in the options; None if traces are written to files."""
    if values.mode != "opentelemetry":
        return None
    require("--trace-config mode=opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    from conch.telemetry.tracing.collector import Collector

    return Collector(values)
