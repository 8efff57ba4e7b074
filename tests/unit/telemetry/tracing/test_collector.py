"""The spans that a collector gets, over its own protocol; and one that is away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from conch.telemetry.tracing.values import TraceValues, values_of
from tests.unit.telemetry.tracing.requests import TracedServer, answer, child

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver(HTTPServer):
    """Takes OTLP over HTTP, and keeps the messages' bytes."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def spans(self) -> list[tuple[Any, Any]]:
        """The spans that arrived, each with its resource."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [
            (span, group.resource)
            for body in self.received
            for group in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.received.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = Thread(target=receiver.serve_forever, args=[0.01])
    thread.start()
    yield receiver
    receiver.shutdown()
    thread.join()
    receiver.server_close()


def values(port: int) -> TraceValues:
    given = [("", "mode", "opentelemetry"), ("", "level", "TIMESTAMPS"), ("", "rate", "1000")]
    given += [("opentelemetry", "url", f"127.0.0.1:{port}/v1/traces"), ("opentelemetry", "resource", "a.b=c")]
    return values_of(given, {})


def test_spans_of_a_call_and_its_calls_hang_together(receiver: Receiver) -> None:
    server = TracedServer(values(receiver.server_port))
    server.ask()  # not requested, and not sampled
    request = server.request(headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "k=v"}, id="one")
    assert request.trace is not None
    context = request.trace.context
    step = child(request, "step")
    answer(step)
    answer(request)
    server.tracing.close()

    got = receiver.spans()
    spans = {(span.name, span.parent_span_id.hex()): span for span, _ in got}
    root = spans["InferRequest", SPAN]
    model = spans["m", root.span_id.hex()]
    called = spans["step", model.span_id.hex()]
    assert {name for name, _ in spans} == {"InferRequest", "m", "step", "compute"}
    assert spans["compute", model.span_id.hex()].events[0].name == "COMPUTE_START"
    assert spans["compute", called.span_id.hex()]
    assert {span.trace_id.hex() for span, _ in got} == {TRACE}
    assert {span.trace_state for span, _ in got} == {"k=v"}
    assert context == f'{{"traceparent":"00-{TRACE}-{model.span_id.hex()}-01"}}'
    attributes = {
        attribute.key: attribute.value.string_value or attribute.value.int_value for attribute in model.attributes
    }
    assert attributes.pop("triton.trace_id") > 0
    assert attributes == {
        "triton.model_name": "m",
        "triton.model_version": 1,
        "triton.trace_parent_id": 0,
        "triton.request_id": "one",
    }
    resource = {attribute.key: attribute.value.string_value for attribute in got[0][1].attributes}
    assert (resource["service.name"], resource["a.b"]) == ("triton-inference-server", "c")


def test_a_collector_that_is_away_costs_spans_and_no_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = TracedServer(values(unused.getsockname()[1]))
        server.tracing.update("", {"rate": 1})
        answered: list[object] = []
        for _ in range(10):
            request = server.request()
            answer(request)
            answered.append(request.finished)
        server.tracing.close()  # returns, although nothing can be sent
    assert answered == [True] * 10
