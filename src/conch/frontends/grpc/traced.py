"""Begins the trace of a gRPC request; called on the event loop, and only where requests may be traced."""

from __future__ import annotations

from time import monotonic_ns

from conch.frontends.grpc.calls import Call
from conch.inference import InferRequest
from conch.telemetry.tracing.trace import GRPC
from conch.telemetry.tracing.tracing import Tracing


def begin_trace(tracing: Tracing, call: Call, request: InferRequest) -> None:
    """Trace a request that its model is about to be given, if it is its turn."""
    now = monotonic_ns()
    # Not set where tracing was turned on after the call was opened.
    tracing.begin(request, GRPC, getattr(call, "began", now), dict(call.head.metadata))
    call.began = now
