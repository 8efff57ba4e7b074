"""Begins the trace of an HTTP request; called on the event loop, and only where requests may be traced."""

from __future__ import annotations

from time import monotonic_ns
from typing import Final

from conch.frontends.http.exchange import HttpExchange
from conch.inference import InferRequest
from conch.telemetry.tracing.trace import HTTP
from conch.telemetry.tracing.tracing import Tracing

_CALLER: Final = (b"traceparent", b"tracestate")


def begin_trace(tracing: Tracing, exchange: HttpExchange, request: InferRequest) -> None:
    """Trace a request that its model is about to be given, if it is its turn."""
    headers = {
        name.decode(): value.decode("latin-1") for name in _CALLER if (value := exchange.headers.get(name)) is not None
    }
    # Not set where tracing was turned on while the body arrived.
    tracing.begin(request, HTTP, getattr(exchange, "began", monotonic_ns()), headers)
