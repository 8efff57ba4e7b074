"""Records the events of a traced request and of the child requests that its model or ensemble makes.

A front end calls :class:`~conch.telemetry.tracing.tracing.Tracing` to begin a trace, with the caller from the W3C Trace
Context headers. The model that accepts the request then calls :meth:`TracedRequest.accepted`, and the request itself
calls :meth:`TracedRequest.ended` and :meth:`TracedRequest.deliver`. The worker's times are read from the request's
``times`` when it ends.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from operator import attrgetter
from time import monotonic_ns
from typing import Final, NamedTuple

from conch.core.inference import InferRequest, InferResponse, OnResponse
from conch.core.tensors import WireTensor

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


class Caller(NamedTuple):
    """The caller's trace and span, and its ``tracestate``."""

    trace_id: int
    span_id: int
    state: str


def caller_of(headers: Mapping[str, str]) -> Caller | None:
    """Return the caller from ``traceparent`` and ``tracestate``; None if the headers are missing or invalid."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if match is None:
        return None
    trace_id, span_id = int(match[1], 16), int(match[2], 16)
    if not (trace_id and span_id):
        return None
    return Caller(trace_id, span_id, headers.get("tracestate", ""))


_ids = count(1)


class FrontendMoments(NamedTuple):
    """Names of a front end's events."""

    received: tuple[str, str]
    sent: tuple[str, str]


HTTP: Final = FrontendMoments(("HTTP_RECV_START", "HTTP_RECV_END"), ("HTTP_SEND_START", "HTTP_SEND_END"))
GRPC: Final = FrontendMoments(("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"), ("GRPC_SEND_START", "GRPC_SEND_END"))


class TraceEvent(NamedTuple):
    """An event of a request and its time (ns, monotonic)."""

    name: str
    ns: int


class TracedTensor(NamedTuple):
    """A copy of an input (``TENSOR_QUEUE_INPUT``) or output (``TENSOR_BACKEND_OUTPUT``) of a request."""

    activity: str
    tensor: WireTensor


class TraceContext(NamedTuple):
    """The OpenTelemetry ids of a trace; ``parent`` is the caller's span, or 0."""

    trace_id: int
    parent: int
    state: str


class TracedRequest:
    """The part of a trace for one request.

    ``parent`` is None for a client's request. ``span`` and ``compute_span`` are OpenTelemetry span ids.
    """

    __slots__ = (
        "_computes", "_frontend", "_recorded", "compute_span", "events", "id", "model_name", "model_version", "parent",
        "request_id", "span", "tensors", "trace",
    )  # fmt: skip

    def __init__(
        self, trace: Trace, parent: TracedRequest | None = None, *, frontend: FrontendMoments | None = None
    ) -> None:
        self.id = next(_ids)
        self.trace = trace
        self.parent = parent
        self.model_name = ""
        self.model_version = 0
        self.request_id = ""
        #: In order of time.
        self.events: list[TraceEvent] = []
        self.tensors: list[TracedTensor] = []
        self.span = trace.new_span_id()
        self.compute_span = trace.new_span_id()
        self._frontend = frontend
        self._recorded = False
        self._computes = True

    @property
    def context(self) -> str | None:
        """The context for requests that the model makes, as JSON; None without a collector."""
        return self.trace.context_of(self)

    def child(self) -> TracedRequest:
        """Return the part for a child request that the model, or an ensemble step, makes."""
        return TracedRequest(self.trace, self)

    def begin(self) -> None:
        """Add this request to the trace, which stays open until the request has ended."""
        self._recorded = True
        self.trace.requests.append(self)
        self.trace.open += 1

    def mark(self, name: str, ns: int) -> None:
        """Record an event."""
        self.events.append(TraceEvent(name, ns))

    def accepted(self, request: InferRequest, computes: bool) -> None:
        """Observe a request that its model is about to queue; ``computes`` is False for an ensemble.

        If the model refuses it after all, :meth:`refused` must be called.
        """
        if not self._recorded:
            if self.trace.closed:
                return
            self.begin()
        self.model_name, self.model_version = request.model_name, request.model_version
        self.request_id = request.id
        if self.trace.tensors:
            self._note_tensors("TENSOR_QUEUE_INPUT", tuple(request.inputs.values()))
            request.observe(self._note_outputs)
        self._computes = computes

    def refused(self) -> None:
        """End the recording of a request that its model refused; it gets no response."""
        if self._recorded:
            self._end()

    def deliver(self, response: InferResponse, on_response: OnResponse) -> None:
        """Pass a response to ``on_response``; for a client's request, record the time of sending."""
        if not self._recorded:
            on_response(response)
            return
        if self.parent is None:
            self.mark("INFER_RESPONSE_COMPLETE", monotonic_ns())
        try:
            if self._frontend is None:
                on_response(response)
            else:
                began = monotonic_ns()
                on_response(response)
                for name, ns in zip(self._frontend.sent, (began, monotonic_ns()), strict=True):
                    self.mark(name, ns)
        finally:
            if response.final:
                self._end()

    def ended(self, request: InferRequest) -> None:
        """Record the times of a request that has ended."""
        if not self._recorded:
            return
        times, now = request.times, monotonic_ns()
        self.mark("REQUEST_START", times.arrived)
        if times.queued:
            self.mark("QUEUE_START", times.queued)
        if times.started and self._computes:
            at = times.started
            self.mark("COMPUTE_START", at)
            for name, duration in (
                ("COMPUTE_INPUT_END", times.compute_input),
                ("COMPUTE_OUTPUT_START", times.compute_infer),
                ("COMPUTE_END", times.compute_output),
            ):
                at = min(at + duration, now)
                self.mark(name, at)
        self.mark("REQUEST_END", now)

    def _note_outputs(self, response: InferResponse) -> None:
        self._note_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)

    def _note_tensors(self, activity: str, tensors: Sequence[WireTensor]) -> None:
        for tensor in tensors:
            copy = WireTensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data))
            self.tensors.append(TracedTensor(activity, copy))

    def _end(self) -> None:
        self.events.sort(key=attrgetter("ns"))
        self.trace.request_ended()


class Trace:
    """A traced request of a client and its child requests; ``on_end`` is called when all have ended."""

    __slots__ = ("_on_end", "closed", "context", "open", "requests", "root_span", "tensors", "timestamps")

    def __init__(
        self, level: Sequence[str], on_end: Callable[[Trace], None], context: TraceContext | None = None
    ) -> None:
        self.timestamps = "TIMESTAMPS" in level
        self.tensors = "TENSORS" in level and context is None
        self.context = context
        #: The client's request first.
        self.requests: list[TracedRequest] = []
        #: The number of requests that have not ended.
        self.open = 0
        self.closed = False
        self.root_span = self.new_span_id()
        self._on_end = on_end

    def new_span_id(self) -> int:
        """Return a new span id; 0 without a collector."""
        return secrets.randbits(64) if self.context is not None else 0

    def context_of(self, request: TracedRequest) -> str | None:
        """Return the context for requests that ``request`` makes: the span of its model."""
        if self.context is None:
            return None
        return f'{{"traceparent":"00-{self.context.trace_id:032x}-{request.span:016x}-01"}}'

    def request_ended(self) -> None:
        """Record the end of one request."""
        self.open -= 1
        if not self.open:
            self.closed = True
            self._on_end(self)
