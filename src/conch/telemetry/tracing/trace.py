"""Records what happens to a request that is traced, and to those that its model or its ensemble's steps make of it.

A front end has :class:`~conch.telemetry.tracing.tracing.Tracing` begin a trace; the model that accepts the request then
calls :meth:`TracedRequest.accepted`, which takes the places of the callbacks that it wants to watch, so that a request
that is not traced costs nothing.  What the worker measured is read from the request's own ``times`` when it ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic_ns
from typing import Final, NamedTuple

from conch.inference import InferRequest, InferResponse
from conch.tensors import WireTensor

_ids = count(1)


class FrontendMoments(NamedTuple):
    """What the moments of a front end are called."""

    received: tuple[str, str]
    sent: tuple[str, str]


HTTP: Final = FrontendMoments(("HTTP_RECV_START", "HTTP_RECV_END"), ("HTTP_SEND_START", "HTTP_SEND_END"))
GRPC: Final = FrontendMoments(("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"), ("GRPC_SEND_START", "GRPC_SEND_END"))


class TraceEvent(NamedTuple):
    """A moment (ns, monotonic) of a request."""

    name: str
    ns: int


class TracedTensor(NamedTuple):
    """A tensor that a request brought (``TENSOR_QUEUE_INPUT``) or got (``TENSOR_BACKEND_OUTPUT``), copied."""

    activity: str
    tensor: WireTensor


class TraceContext(NamedTuple):
    """The ids under which OpenTelemetry's spans of a trace are found; ``parent`` is the caller's span, or 0."""

    trace_id: int
    parent: int
    state: str


class TracedRequest:
    """A request's part of a trace.

    ``parent`` is None for the request of a client.  ``span`` and ``compute_span`` are the ids of OpenTelemetry's spans.
    """

    __slots__ = (
        "_frontend", "_recorded", "compute_span", "events", "id", "model_name", "model_version", "parent",
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
        #: In the order of time.
        self.events: list[TraceEvent] = []
        self.tensors: list[TracedTensor] = []
        self.span = trace.new_span_id()
        self.compute_span = trace.new_span_id()
        self._frontend = frontend
        self._recorded = False

    @property
    def context(self) -> str | None:
        """The context for whoever the model calls, as JSON; None where the trace goes to no collector."""
        return self.trace.context_of(self)

    def child(self) -> TracedRequest:
        """The part of a request that the model, or a step of the ensemble, makes to answer this one."""
        return TracedRequest(self.trace, self)

    def begin(self) -> None:
        """Make this a part of the trace, which lasts until it has ended."""
        self._recorded = True
        self.trace.requests.append(self)
        self.trace.open += 1

    def mark(self, name: str, ns: int) -> None:
        """Note a moment."""
        self.events.append(TraceEvent(name, ns))

    def accepted(self, request: InferRequest, computes: bool) -> None:
        """Watch a request that its model is about to queue, and to compute itself unless it is an ensemble.

        :meth:`refused` is called if it does not after all.
        """
        if not self._recorded:
            if self.trace.closed:
                return
            self.begin()
        self.model_name, self.model_version = request.model_name, request.model_version
        self.request_id = request.id
        if self.trace.tensors:
            self._note_tensors("TENSOR_QUEUE_INPUT", tuple(request.inputs.values()))
        on_response, on_final = request.on_response, request.on_final

        def ended(request: InferRequest, response: InferResponse) -> None:
            self._note_times(request, computes, monotonic_ns())
            if on_final is not None:
                on_final(request, response)

        request.on_final = ended
        request.on_response = lambda response: self._respond(response, on_response)

    def refused(self) -> None:
        """The model did not take the request, which gets no response."""
        if self._recorded:
            self._end()

    def _respond(self, response: InferResponse, on_response: Callable[[InferResponse], None]) -> None:
        """Pass a response on, and note it and, for a client, how long sending it took."""
        if self.trace.tensors:
            self._note_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
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

    def _note_times(self, request: InferRequest, computes: bool, now: int) -> None:
        times = request.times
        self.mark("REQUEST_START", times.arrived)
        if times.queued:
            self.mark("QUEUE_START", times.queued)
        if times.started and computes:
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

    def _note_tensors(self, activity: str, tensors: Sequence[WireTensor]) -> None:
        for tensor in tensors:
            copy = WireTensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data))
            self.tensors.append(TracedTensor(activity, copy))

    def _end(self) -> None:
        self.events.sort(key=_moment)
        self.trace.close_one()


class Trace:
    """A request of a client that is traced, with those made of it; ``on_end`` takes it when all of them have ended."""

    __slots__ = ("_on_end", "closed", "context", "open", "requests", "root_span", "tensors", "timestamps")

    def __init__(
        self, level: Sequence[str], on_end: Callable[[Trace], None], context: TraceContext | None = None
    ) -> None:
        self.timestamps = "TIMESTAMPS" in level
        self.tensors = "TENSORS" in level and context is None
        self.context = context
        #: The client's first.
        self.requests: list[TracedRequest] = []
        #: How many of the requests have not ended.
        self.open = 0
        self.closed = False
        self.root_span = self.new_span_id()
        self._on_end = on_end

    def new_span_id(self) -> int:
        """An id for a span; 0 where there are none."""
        return secrets.randbits(64) if self.context is not None else 0

    def context_of(self, request: TracedRequest) -> str | None:
        """The context of what is called for ``request``: its model's span."""
        if self.context is None:
            return None
        return f'{{"traceparent":"00-{self.context.trace_id:032x}-{request.span:016x}-01"}}'

    def close_one(self) -> None:
        """One more request has ended."""
        self.open -= 1
        if not self.open:
            self.closed = True
            self._on_end(self)


def _moment(event: TraceEvent) -> int:
    return event.ns
