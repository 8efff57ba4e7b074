"""Requests that are traced without a server: a model that answers when the test says."""

from __future__ import annotations

from conch.core.errors import internal
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor, pack_bytes
from conch.telemetry.tracing.trace import HTTP, Trace
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues


class KeptTraces:
    """Takes the traces that would be written."""

    def __init__(self) -> None:
        self.appended: list[list[Trace]] = []
        self.numbered: list[list[Trace]] = []

    def append(self, traces: list[Trace]) -> None:
        self.appended.append(list(traces))

    def write_numbered(self, traces: list[Trace]) -> None:
        self.numbered.append(list(traces))

    def close(self) -> None: ...


class TracedServer:
    """Accepts requests as a server does whose ``tracing`` has these values."""

    def __init__(self, values: TraceValues, kept: KeptTraces | None = None) -> None:
        self.tracing = Tracing(values)
        self.kept = kept or KeptTraces()
        if values.mode == "triton":
            self.tracing = Tracing(values, self.kept)

    def request(self, model: str = "m", headers: dict[str, str] | None = None, id: str = "") -> InferRequest:
        """A request of a client that its model has accepted."""
        inputs = {"text": WireTensor("text", "BYTES", (2,), pack_bytes([b'say "x"', b"y\n"]))}
        request = InferRequest(model, inputs, lambda response: None, model_version=1, id=id)
        if self.tracing.on:
            self.tracing.begin(request, HTTP, request.times.arrived, headers)
        return accept(request)

    def ask(self, model: str = "m", headers: dict[str, str] | None = None) -> None:
        """Send a request that is answered at once."""
        answer(self.request(model, headers))


def accept(request: InferRequest) -> InferRequest:
    if request.trace is not None:
        request.trace.accepted(request, computes=True)
    request.times.queued = request.times.started = request.times.arrived
    return request


def child(parent: InferRequest, model: str) -> InferRequest:
    """A request that was made to answer ``parent``, accepted."""
    request = InferRequest(model, {}, lambda response: None, model_version=2)
    assert parent.trace is not None
    request.trace = parent.trace.child()
    return accept(request)


def answer(request: InferRequest, failed: bool = False) -> None:
    number = WireTensor("n", "INT32", (1,), b"\x07\0\0\0")
    request.respond(InferResponse([number]) if not failed else InferResponse(error=internal("no")))
