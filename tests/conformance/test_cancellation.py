"""A gRPC client cancels: the model can see it while it runs, and the verbose log shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.conformance.grpc_cases import request, tensor
from tests.conformance.raw import post
from tests.conftest import Server
from tests.events import Events, eventually


@pytest.fixture
def verbose(server: Server) -> Iterator[None]:
    post(server.http, "/v2/logging", {"log_verbose_level": 1})
    yield
    post(server.http, "/v2/logging", {"log_verbose_level": 0})


@pytest.mark.parametrize(
    ("handler", "takes_response"),
    [("ModelInferHandler", "InferResponseComplete"), ("ModelStreamInferHandler", "StreamInferResponseComplete")],
)
def test_cancelled_call_cancels_its_request(
    server: Server, verbose: None, events: Events, handler: str, takes_response: str
) -> None:
    assert isinstance(server.log, Path)
    log, before = server.log, server.log.stat().st_size
    inputs = [
        tensor("EVENTS", "BYTES", [1, 1], bytes_contents=[str(events.folder).encode()]),
        tensor("NAME", "BYTES", [1, 1], bytes_contents=[b"leaving"]),
    ]
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        infer = request("gate", inputs)
        call = stub.ModelInfer.future(infer) if handler == "ModelInferHandler" else stub.ModelStreamInfer(iter([infer]))
        events.wait("leaving.started")
        call.cancel()
        events.wait("leaving.cancelled")
    said = (
        rf"Cancellation notification received for {handler}, rpc_ok=1, context \d+, \d+ step ISSUED",
        r"Issuing cancellation for \d+",
        rf"{handler}::{takes_response}, \d+, skipping response generation as grpc transaction was cancelled\.\.\. ",
        rf"Completing cancellation for {handler}, rpc_ok=1, context \d+, \d+ step CANCELLED",
    )

    def text() -> str:
        return log.read_bytes()[before:].decode(errors="replace")

    eventually(lambda: all(re.search(line, text()) for line in said), "the lines about the cancellation")
