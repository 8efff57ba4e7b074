"""``generate`` for several texts: one exchange that ends once, whatever becomes of its requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conch.core.errors import ConchError, unavailable
from conch.core.inference import InferRequest, InferResponse, ignore
from conch.core.tensors import WireTensor
from conch.frontends.budget import ByteBudget
from conch.frontends.http.dialects import refuse
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.responders import TextsResponder
from conch.frontends.offloading.offloader import Offloader
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues
from tests.unit.frontends.http.site import WrittenConnection


class Accepting:
    """A model that accepts requests; the test responds to them."""

    def infer(self, request: InferRequest) -> None: ...


def asked(texts: int, model: Any = None) -> tuple[WrittenConnection, list[InferRequest]]:
    client: Any = WrittenConnection()
    exchange = HttpExchange(client, b"POST", b"/v2/models/m/generate", {}, True)
    requests = [InferRequest("m", {}, ignore, model_version=1) for _ in range(texts)]
    responder = TextsResponder(exchange, requests, Offloader(1 << 30, 30, ByteBudget(1 << 30)), decoupled=False)
    try:
        responder.start(model or Accepting(), Tracing(TraceValues()))
    except ConchError as error:  # as the handler does
        refuse(exchange, error)
    return client, requests


def answer(value: float) -> InferResponse:
    return InferResponse([WireTensor("score", "FP32", (1,), np.array([value], np.float32).tobytes())])


def test_answers_stand_in_the_order_of_the_texts() -> None:
    client, (first, second) = asked(2)
    second.respond(answer(2))
    assert client.written == b""
    first.respond(answer(1))
    assert client.written.endswith(b'"score":[1.0,2.0]}') and client.ended == 1


def test_one_that_fails_ends_the_exchange_and_the_others() -> None:
    client, requests = asked(3)
    requests[1].respond(InferResponse(error=unavailable("the queue is full")))
    assert client.written.startswith(b"HTTP/1.1 503 ") and client.ended == 1
    assert [request.cancelled for request in requests] == [True, False, True]
    requests[0].respond(answer(1))
    assert client.ended == 1


def test_an_answer_that_cannot_be_written_does_not_leave_the_client_waiting() -> None:
    client, (request,) = asked(1)
    request.respond(InferResponse([WireTensor("score", "FP32", (1,), b"odd")]))
    assert client.written.startswith(b"HTTP/1.1 500 ") and client.ended == 1


class Full:
    """A model with room for one request; it refuses others, or accepts them and they fail at once."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.sent: list[InferRequest] = []

    def infer(self, request: InferRequest) -> None:
        self.sent.append(request)
        if len(self.sent) > 1:
            if self.refuses:
                raise unavailable("the queue is full")
            request.fail(unavailable("the queue is full"))


@pytest.mark.parametrize("refuses", [True, False])
def test_requests_after_one_that_fails_at_once_are_not_sent(refuses: bool) -> None:
    model = Full(refuses)
    client, requests = asked(4, model)
    assert client.written.startswith(b"HTTP/1.1 503 ") and client.ended == 1
    assert model.sent == requests[:2] and requests[0].cancelled
