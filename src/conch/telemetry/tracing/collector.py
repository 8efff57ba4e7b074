"""Sends traces to an OpenTelemetry collector with OpenTelemetry's Python SDK (extra ``opentelemetry``).

Spans have Triton's structure: ``InferRequest`` for the front end, below it one span per model, with the model's name,
and below that ``compute``. They are created when a trace has ended and put into the SDK's queue; its thread sends
them. A slow or unreachable collector loses spans, but does not delay requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from threading import Thread
from time import monotonic_ns, time_ns
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState

from conch.telemetry.tracing.trace import Caller, Trace, TraceContext, TracedRequest, TraceEvent
from conch.telemetry.tracing.values import TraceValues

_SCOPE: Final = "triton-server"
_SERVICE: Final = "triton-inference-server"
_DEFAULT_URL: Final = "http://localhost:4318/v1/traces"
#: The timeout of sending the last spans when the server stops (s).
_LAST_SECONDS: Final = 1.0
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

_REQUEST: Final = frozenset({"REQUEST_START", "QUEUE_START", "REQUEST_END"})
_OF_MODELS: Final = _REQUEST | {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}


class Collector:
    """Receives the traces of a server and sends their spans."""

    def __init__(self, values: TraceValues) -> None:
        options = values.options
        queue = int(options["bsp_max_queue_size"])
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=_endpoint(options.get("url", ""))),
            max_queue_size=queue,
            schedule_delay_millis=int(options["bsp_schedule_delay"]),
            max_export_batch_size=min(int(options["bsp_max_export_batch_size"]), queue),
        )
        self._resource = Resource.create({"service.name": _SERVICE, **values.resource})
        self._scope = InstrumentationScope(_SCOPE)
        #: The offset from the events' clock to the time of day (ns).
        self._offset = time_ns() - monotonic_ns()

    def new_context(self, caller: Caller | None) -> TraceContext:
        """Return the context of a new trace, continuing the caller's if there is one."""
        if caller is None:
            return TraceContext(secrets.randbits(128), 0, "")
        return TraceContext(caller.trace_id, caller.span_id, caller.state)

    def append(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            for span in self._spans(trace):
                self._processor.on_end(span)

    def write_numbered(self, traces: Sequence[Trace]) -> None:
        """Send the traces; a collector has no numbered files."""
        self.append(traces)

    def close(self) -> None:
        """Send pending spans, for a limited time, because the SDK retries an unreachable collector for too long."""
        closing = Thread(target=self._processor.shutdown, name="conch-traces-end", daemon=True)
        closing.start()
        closing.join(_LAST_SECONDS)

    def _spans(self, trace: Trace) -> Iterator[ReadableSpan]:
        """Yield the spans of a trace, children before their parents."""
        assert trace.context is not None
        root = trace.requests[0]
        frontend = [event for event in root.events if event.name not in _OF_MODELS]
        for request in reversed(trace.requests):
            yield from self._model_spans(trace.context, request)
        yield self._span("InferRequest", trace.context, trace.root_span, trace.context.parent, frontend)

    def _model_spans(self, context: TraceContext, request: TracedRequest) -> Iterator[ReadableSpan]:
        compute = [event for event in request.events if event.name.startswith("COMPUTE_")]
        events = [event for event in request.events if event.name in _REQUEST]
        if not events:  # the model did not accept it
            return
        if compute:
            yield self._span("compute", context, request.compute_span, request.span, compute)
        attributes: dict[str, str | int] = {
            "triton.model_name": request.model_name,
            "triton.model_version": request.model_version,
            "triton.trace_id": request.id,
            "triton.trace_parent_id": request.parent.id if request.parent is not None else 0,
        }
        if request.request_id:
            attributes["triton.request_id"] = request.request_id
        parent = request.parent.span if request.parent is not None else request.trace.root_span
        yield self._span(request.model_name, context, request.span, parent, events, attributes)

    def _span(
        self,
        name: str,
        context: TraceContext,
        span: int,
        parent: int,
        events: Sequence[TraceEvent],
        attributes: dict[str, str | int] | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            self._span_context(context, span, remote=False),
            self._span_context(context, parent, remote=parent == context.parent) if parent else None,
            self._resource,
            attributes,
            [Event(event.name, timestamp=event.ns + self._offset) for event in events],
            kind=SpanKind.SERVER,
            instrumentation_scope=self._scope,
            start_time=events[0].ns + self._offset,
            end_time=events[-1].ns + self._offset,
        )

    def _span_context(self, context: TraceContext, span: int, remote: bool) -> SpanContext:
        state = TraceState.from_header([context.state]) if context.state else None
        return SpanContext(context.trace_id, span, remote, _SAMPLED, state)


def _endpoint(url: str) -> str:
    """Return the URL of a collector; like Triton, accepts it without a scheme."""
    if not url:
        return _DEFAULT_URL
    return url if "://" in url else f"http://{url}"
