"""Responses without outputs: those of a model that makes none, and the end of a decoupled model's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from conch.core.inference import InferRequest, InferResponse, ignore
from conch.frontends.budget import ByteBudget
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.responders import (
    GenerateResponder,
    GenerateStreamResponder,
    InferResponder,
    TextsResponder,
)
from conch.frontends.offloading.offloader import Offloader
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues
from conch.wire.json.generate import NOT_ONE_RESPONSE, Layout
from conch.wire.json.infer import JsonOutputPlan
from tests.unit.frontends.http.site import WrittenConnection

ANSWER = {"model_name": "m", "model_version": "1"}
BOTH = [InferResponse()], [InferResponse(final=False), InferResponse()]


def offloader() -> Offloader:
    return Offloader(1 << 30, 30, ByteBudget(1 << 30))


def exchange_for(connection: Any, endpoint: bytes) -> HttpExchange:
    return HttpExchange(connection, b"POST", b"/v2/models/m/" + endpoint, {}, True)


def body_after(responses: list[InferResponse], connection: WrittenConnection, request: InferRequest) -> Any:
    for response in responses:
        request.respond(response)
    assert connection.ended == 1 and connection.written.startswith(b"HTTP/1.1 200 ")
    return json.loads(connection.written.partition(b"\r\n\r\n")[2])


def generated(responses: list[InferResponse], *, decoupled: bool) -> Any:
    connection: Any = WrittenConnection()
    responder = GenerateResponder(exchange_for(connection, b"generate"), offloader(), decoupled=decoupled)
    responder.layout = Layout.FLAT
    responder.request = InferRequest("m", {}, responder.on_response, model_version=1)
    return body_after(responses, connection, responder.request)


@pytest.mark.parametrize("responses", BOTH)
def test_generate_answers_with_a_response_that_has_no_outputs(responses: list[InferResponse]) -> None:
    assert generated(responses, decoupled=False) == ANSWER


def test_the_end_of_a_decoupled_model_is_no_response_to_generate() -> None:
    assert generated([InferResponse()], decoupled=True) == {"error": NOT_ONE_RESPONSE}


@pytest.mark.parametrize("responses", BOTH)
def test_a_text_may_have_a_response_without_outputs(responses: list[InferResponse]) -> None:
    connection: Any = WrittenConnection()
    request = InferRequest("m", {}, ignore, model_version=1)
    responder = TextsResponder(exchange_for(connection, b"generate"), [request], offloader(), decoupled=False)
    model: Any = type("Accepting", (), {"infer": ignore})
    responder.start(model, Tracing(TraceValues()))
    assert body_after(responses, connection, request) == ANSWER


@pytest.mark.parametrize("responses", BOTH)
def test_infer_answers_with_a_response_that_has_no_outputs(responses: list[InferResponse]) -> None:
    connection: Any = WrittenConnection()
    model: Any = type("Uncached", (), {"held": nullcontext})
    responder = InferResponder(exchange_for(connection, b"infer"), model, offloader())
    responder.plan = JsonOutputPlan()
    responder.request = InferRequest("m", {}, responder.on_response, model_version=1)
    assert body_after(responses, connection, responder.request) == {**ANSWER, "outputs": []}


@pytest.mark.parametrize(("decoupled", "events"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("responses", BOTH)
def test_a_stream_has_an_event_for_a_response_without_outputs(
    responses: list[InferResponse], decoupled: bool, events: int
) -> None:
    connection: Any = WrittenConnection()
    responder = GenerateStreamResponder(exchange_for(connection, b"generate_stream"), offloader(), decoupled=decoupled)
    responder.layout = Layout.FLAT
    responder.request = InferRequest("m", {}, responder.on_response, model_version=1)
    for response in responses:
        responder.request.respond(response)
    assert connection.ended == 1 and connection.written.count(b"data: ") == events
