"""Begins the trace of a gRPC request; called on the event loop while tracing is on."""

from __future__ import annotations

from time import monotonic_ns

from conch.core.inference import InferRequest
from conch.frontends.grpc.calls import Call
from conch.telemetry.tracing.trace import GRPC
from conch.telemetry.tracing.tracing import Tracing


def begin_trace(tracing: Tracing, call: Call, request: InferRequest) -> None:
    """Begin the trace of a request before its model gets it, if the request is sampled."""
    now = monotonic_ns()
    # Missing if tracing was enabled after the call was opened.
    tracing.begin(request, GRPC, getattr(call, "began", now), dict(call.head.metadata))
    call.began = now
