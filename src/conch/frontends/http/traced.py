"""Begins the trace of an HTTP request; called on the event loop while tracing is on."""

from __future__ import annotations

from time import monotonic_ns
from typing import Final

from conch.core.inference import InferRequest
from conch.frontends.http.exchange import HttpExchange
from conch.telemetry.tracing.trace import HTTP
from conch.telemetry.tracing.tracing import Tracing

_CALLER: Final = (b"traceparent", b"tracestate")


def begin_trace(tracing: Tracing, exchange: HttpExchange, request: InferRequest) -> None:
    """Begin the trace of a request before its model gets it, if the request is sampled."""
    headers = {
        name.decode(): value.decode("latin-1") for name in _CALLER if (value := exchange.headers.get(name)) is not None
    }
    # Missing if tracing was enabled while the body arrived.
    tracing.begin(request, HTTP, getattr(exchange, "began", monotonic_ns()), headers)
