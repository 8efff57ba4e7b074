"""A client that cancels ends its own request and no other; what has not started never runs."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.conformance.conftest import gate_request, pass_gate, pending, wait_for_pending
from tests.conformance.grpc_cases import request, tensor
from tests.conformance.raw import Reply
from tests.e2e.conftest import Serve
from tests.events import Events, eventually
from tests.servers import ConchServer

Background = Callable[..., Future[Any]]
GiveUp = Callable[[], None]


def send_by_http(server: ConchServer, events: Events, name: str) -> GiveUp:
    """Send a request through the gate on a plain connection; giving up closes it."""
    host, port = server.http.split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps(gate_request(events, name)).encode()
    head = f"POST /v2/models/gate/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection.close


def send_by_grpc(server: ConchServer, events: Events, name: str) -> GiveUp:
    """Send a request through the gate as a call; giving up cancels it."""
    channel = grpc.insecure_channel(server.grpc)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    inputs = [
        tensor("EVENTS", "BYTES", [1, 1], bytes_contents=[str(events.folder).encode()]),
        tensor("NAME", "BYTES", [1, 1], bytes_contents=[name.encode()]),
    ]
    future = stub.ModelInfer.future(request("gate", inputs))

    def give_up() -> None:
        future.cancel()
        channel.close()

    return give_up


@pytest.fixture(params=[send_by_http, send_by_grpc], ids=["http", "grpc"])
def send(request: pytest.FixtureRequest) -> Callable[..., GiveUp]:
    chosen: Callable[..., GiveUp] = request.param
    return chosen


def ok(reply: Reply, name: str) -> bool:
    return reply.status == 200 and reply.json()["outputs"][0]["data"] == [name]


def test_cancelled_request_leaves_its_batch_alone(
    serve: Serve, events: Events, background: Background, send: Callable[..., GiveUp]
) -> None:
    server = serve("gate")
    first = background(pass_gate, server, events, "first")
    events.wait("first.started")
    kept = background(pass_gate, server, events, "kept")
    wait_for_pending(server, "gate", 1)
    give_up = send(server, events, "leaving")
    wait_for_pending(server, "gate", 2)
    events.set("first.go")
    events.wait("leaving.started")
    events.wait("kept.started")
    give_up()
    events.wait("leaving.cancelled")
    assert not events.happened("kept.cancelled")
    events.set("kept.go")
    assert ok(first.result(), "first")
    assert ok(kept.result(), "kept")


def test_cancelled_request_that_waits_never_runs(
    serve: Serve, events: Events, background: Background, send: Callable[..., GiveUp]
) -> None:
    server = serve("gate")
    running = background(pass_gate, server, events, "running")
    events.wait("running.started")
    give_up = send(server, events, "leaving")
    wait_for_pending(server, "gate", 1)
    after = background(pass_gate, server, events, "after")
    wait_for_pending(server, "gate", 2)
    give_up()
    eventually(lambda: pending(server, "gate") == 1, "the request leaving the queue")
    events.set("running.go", "after.go")
    assert ok(running.result(), "running")
    assert ok(after.result(), "after")
    assert not events.happened("leaving.started")


def cancelled_in_the_model(log: Path) -> bool:
    return "repeat: cancelled before response" in log.read_text(errors="replace")


def test_client_hangs_up_while_streaming(serve: Serve, tmp_path: Path) -> None:
    """The sender sees the cancellation: the model's thread ends long before its 1000 responses."""
    server = serve("repeat")
    host, port = server.http.split(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps({"IN": list(range(1000)), "DELAY": [0] + [20] * 999}).encode()
    head = f"POST /v2/models/repeat/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    assert b"200 OK" in connection.recv(4096)
    connection.close()
    eventually(lambda: cancelled_in_the_model(tmp_path / "server.log"), "the model seeing it")


def test_grpc_stream_is_cancelled_while_streaming(serve: Serve, tmp_path: Path) -> None:
    server = serve("repeat")
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        inputs = [
            tensor("IN", "INT32", [1000], int_contents=range(1000)),
            tensor("DELAY", "UINT32", [1000], uint_contents=[0] + [20] * 999),
        ]
        responses = stub.ModelStreamInfer(iter([request("repeat", inputs)]))
        next(responses)
        responses.cancel()
        eventually(lambda: cancelled_in_the_model(tmp_path / "server.log"), "the model seeing it")
        again = stub.ModelStreamInfer(iter([request("repeat", [tensor("IN", "INT32", [1], int_contents=[5])])]))
        assert len(list(again)) == 1


def test_many_clients_hang_up_and_the_others_are_served(serve: Serve, events: Events, background: Background) -> None:
    server = serve("gate")
    running = background(pass_gate, server, events, "running")
    events.wait("running.started")
    leaving, staying = [], []
    for n in range(20):
        leaving.append(send_by_http(server, events, f"leaving{n}"))
        staying.append(background(pass_gate, server, events, f"staying{n}"))
    wait_for_pending(server, "gate", 40)
    for give_up in leaving:
        give_up()
    wait_for_pending(server, "gate", 20)
    events.set("running.go", *(f"staying{n}.go" for n in range(20)))
    assert all(ok(future.result(), f"staying{n}") for n, future in enumerate(staying))
    assert ok(running.result(), "running")
    assert not any(events.happened(f"leaving{n}.started") for n in range(20))
