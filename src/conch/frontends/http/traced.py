"""Begins the trace of an HTTP request, and identifies it in the access log; called on the event loop."""

from __future__ import annotations

from time import monotonic_ns
from typing import Final

from conch.core.inference import InferRequest
from conch.frontends.http.exchange import HttpExchange
from conch.telemetry.tracing.trace import HTTP
from conch.telemetry.tracing.tracing import Tracing

_CALLER: Final = (b"traceparent", b"tracestate")


def observe(tracing: Tracing, exchange: HttpExchange, request: InferRequest) -> None:
    """Begin the trace of a request, if it is sampled, before its model gets it; identify it in the access log."""
    if tracing.on:
        _begin_trace(tracing, exchange, request)
    if exchange.record is not None:
        exchange.record.identify(request)


def _begin_trace(tracing: Tracing, exchange: HttpExchange, request: InferRequest) -> None:
    headers = {
        name.decode(): value.decode("latin-1") for name in _CALLER if (value := exchange.headers.get(name)) is not None
    }
    # Missing if tracing was enabled while the body arrived.
    tracing.begin(request, HTTP, getattr(exchange, "began", monotonic_ns()), headers)
