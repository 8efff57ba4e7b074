"""Which requests are traced: the trace settings, global and of models, and what takes the traces.

The application makes one ``Tracing`` from the options.  Front ends ask ``on`` before anything else, the one thing that
tracing costs where it is off, and begin traces with :meth:`Tracing.begin`; clients read and change the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from conch.extras import require
from conch.inference import InferRequest
from conch.telemetry.tracing.files import TraceFile
from conch.telemetry.tracing.parents import caller_of
from conch.telemetry.tracing.trace import FrontendMoments, Trace, TracedRequest
from conch.telemetry.tracing.values import OwnValues, TraceChanges, TraceValues

if TYPE_CHECKING:
    from conch.telemetry.tracing.collector import Collector


class TraceSink(Protocol):
    """What takes traces that have ended: a file, or a collector."""

    def append(self, traces: Sequence[Trace]) -> None: ...

    def write_numbered(self, traces: Sequence[Trace]) -> None: ...

    def close(self) -> None: ...


class Sampling:
    """Counts requests and traces for one setting, from the change that made it to the next.

    Traces that were begun with it end with it: when it is :meth:`retired`, what it has kept is written as soon as the
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
        """Whether requests may be traced."""
        return self._possible and self._left != 0

    @property
    def shown(self) -> TraceValues:
        """The values with as many traces as are left."""
        return replace(self.values, count=self._left)

    def takes(self, forced: bool) -> bool:
        """Whether the next request is traced: each ``rate``-th, or one that its client wants to be."""
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
        """Keep a trace, or write what is kept: in numbered files of ``log_frequency`` traces, or when all are there."""
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
        """Another setting takes its place: write what is kept, once nothing is under way."""
        self._retired = True
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._retired and not self._open and self._kept:
            self._write(self._sink.write_numbered if self.values.log_frequency else self._sink.append)

    def _write(self, write: Callable[[Sequence[Trace]], None]) -> None:
        kept, self._kept = self._kept, []
        write(kept)


class Tracing:
    """The settings of a server.  ``sink`` takes the traces, by default what ``startup`` says: a file or a collector.

    Raises UNSUPPORTED where a collector is wanted and OpenTelemetry is not installed.
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
        """Trace a request if it is its turn, which a model is about to be given.

        ``began`` is when it started to arrive; ``headers`` has ``traceparent`` and ``tracestate`` where they came.
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
        """The setting of a model, or with an empty name the global one, as clients see it."""
        return self._of_models.get(model, self._global).shown.shown()

    def update(self, model: str, changes: TraceChanges) -> None:
        """Change the setting of a model, or with an empty name the global one and what models take from it.

        A field that is None is cleared.  Raises INVALID_ARG for values with which nothing could be traced, unless they
        turn tracing off; nothing is changed then.
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
        self.on = any(one.active for one in (self._global, *self._of_models.values()))

    def close(self) -> None:
        """Write what is kept, and end the files; call it when no request is under way, not on the event loop."""
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
    """The collector that the options name; None where traces go to files."""
    if values.mode != "opentelemetry":
        return None
    require("--trace-config mode=opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    from conch.telemetry.tracing.collector import Collector

    return Collector(values)
