"""Responses to transcriptions that cannot be written."""

from __future__ import annotations

from typing import Any

import pytest

from conch.core.errors import unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.transcriptions import TranscriptionResponder
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues
from conch.wire.transcriptions import TranscriptionPlan
from tests.unit.frontends.http.site import WrittenConnection


class BusyOffloader:
    """Refuses to encode."""

    async def run(self, *arguments: Any) -> Any:
        raise unavailable("too many large requests")


class Model:
    """Keeps its requests."""

    name = "whisper"

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []

    def infer(self, request: InferRequest) -> None:
        self.requests.append(request)


@pytest.mark.parametrize("stream", [False, True])
async def test_error_of_the_encoding_is_the_response_or_its_last_event(stream: bool) -> None:
    connection: Any = WrittenConnection()
    exchange = HttpExchange(connection, b"POST", b"/v1/audio/transcriptions", {}, True)
    plan = TranscriptionPlan(task="transcribe", format="json", stream=stream, temperature=0, timestamps=["none"])
    model: Any = Model()
    offloader: Any = BusyOffloader()
    TranscriptionResponder(exchange, model, plan, [{}], offloader=offloader).start(model, Tracing(TraceValues()))
    [request] = model.requests
    if request.on_text is not None:
        request.on_text("Hello")
    request.on_response(InferResponse([]))
    lines = connection.written.split(b"\r\n")
    assert [line for line in lines if line.startswith(b"HTTP/1.1 ")] == [lines[0]] and connection.ended == 1
    assert lines[0] == (b"HTTP/1.1 200 OK" if stream else b"HTTP/1.1 503 Service Unavailable")
    assert b"too many large requests" in connection.written
    assert connection.written.endswith(b"0\r\n\r\n") is stream
