"""The life of the front end and of its connections: listening, draining, keepalive, age, TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from conch.core.errors import Code, ConchError
from conch.frontends.grpc.server import Lifetime
from conch.http2 import Http2ErrorCode, frames
from conch.options.settings import Settings
from tests.unit.fake_clock import fake_clock
from tests.unit.frontends.grpc.conftest import models, text_of, text_request
from tests.unit.frontends.grpc.fake_core import echo
from tests.unit.frontends.grpc.harness import Frontend
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, headers

HELD = text_request("hold", "x").SerializeToString()


def finish_held(frontend: Frontend) -> None:
    for request in frontend.server.models["hold"].received:
        frontend.call(echo, request)


def test_port_in_use_is_refused_with_tritons_words(frontend):
    host, port = frontend.address
    with pytest.raises(ConchError) as caught:
        frontend.wait(frontend.frontend.start(host, port))
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == f"Socket '{host}:{port}' already in use "


def test_port_may_be_shared():
    with Frontend(reuse_grpc_port=True) as first, Frontend(reuse_grpc_port=True) as second:
        assert second.wait(second.frontend.start(*first.address)) == first.address


# Stopping


def test_stopping_finishes_what_has_begun(frontend, stub):
    call = stub.ModelInfer.future(text_request("hold", "x"))
    model = frontend.server.models["hold"]
    frontend.until(lambda: model.received)
    stopping = frontend.begin(frontend.frontend.stop(30))
    with pytest.raises(ConnectionError):
        while True:
            socket.create_connection(frontend.address).close()
    finish_held(frontend)
    assert text_of(call.result()) == "x"
    stopping.result(60)
    assert not frontend.frontend.connections


def test_draining_connection_refuses_new_streams_only_once_the_client_knows(frontend):
    with frontend.client() as client:
        client.answer_pings = False
        held = client.request(INFER, HELD)
        client.ping()
        stopping = frontend.begin(frontend.frontend.stop(30))
        while not client.goaways:
            client.receive()
        assert client.goaways == [frames.MAX_WINDOW]
        # Sent before the client could know, so it is served.
        assert client.answer(client.request(LIVE, b"")).status == 0
        client.send(frames.frame(frames.PING, frames.ACK, 0, b"conch-go"))
        last = client.new_stream()
        client.send(client.head(last, headers()))
        assert client.answer(last).reset == Http2ErrorCode.REFUSED_STREAM
        assert client.goaways[1] == held + 2
        finish_held(frontend)
        assert client.answer(held).status == 0
        client.until_closed()
        stopping.result(60)


def test_stopping_cancels_what_does_not_finish_in_time(frontend):
    with frontend.client() as client:
        client.request(INFER, HELD)
        client.ping()
        frontend.wait(frontend.frontend.stop(0.01))
        model = frontend.server.models["hold"]
        assert model.cancelled == model.received != []
        client.until_closed()


def test_idle_connections_close_at_once(frontend):
    with frontend.client() as client:
        client.ping()
        stopping = frontend.begin(frontend.frontend.stop(30))
        client.until_closed()
        stopping.result(60)


# Keepalive and age


def test_silent_client_with_a_call_is_pinged_and_hung_up_on():
    with Frontend(*models(), grpc_keepalive_time=20, grpc_keepalive_timeout=20) as frontend:
        with frontend.client() as client:
            client.answer_pings = False
            client.request(INFER, HELD)
            client.until_closed()
            assert client.goaway == (Http2ErrorCode.NO_ERROR, "keepalive_timeout")
        model = frontend.server.models["hold"]
        assert model.cancelled == model.received != []


def test_answer_to_a_ping_shows_that_the_client_is_there():
    with Frontend(*models(), grpc_keepalive_time=10, grpc_keepalive_timeout=60_000) as frontend:
        with frontend.client() as client:
            held = client.request(INFER, HELD)
            while not client.pinged:
                assert client.receive()
            [connection] = frontend.frontend.connections
            frontend.until(lambda: connection.active)
            finish_held(frontend)
            assert client.answer(held).status == 0


class FakeConnection:
    """A connection without calls whose client answers pings at once; keeps what its lifetime does with it."""

    def __init__(self) -> None:
        self.active = False
        self.session = SimpleNamespace(streams={})
        self.writer = SimpleNamespace(useful=0)
        self.events: list[str] = []

    def ping(self) -> None:
        self.events.append("ping")
        self.active = True

    def drain(self) -> None:
        self.events.append("drain")

    def fail(self, code: Http2ErrorCode, message: str) -> None:
        self.events.append(f"{code.name} {message}")


@fake_clock
async def test_client_that_answers_pings_stays_and_is_pinged_only_so_often_without_data() -> None:
    connection = FakeConnection()
    settings = Settings(grpc_keepalive_time=1000, grpc_keepalive_timeout=1000, grpc_keepalive_permit_without_calls=True)
    Lifetime(connection, settings)  # type: ignore[arg-type]
    await asyncio.sleep(100)
    assert connection.events == ["ping"] * 2
    connection.writer.useful += 1
    await asyncio.sleep(100)
    assert connection.events == ["ping"] * 4


def test_old_connection_is_drained():
    with Frontend(*models(), grpc_max_connection_age=20) as frontend, frontend.client() as client:
        held = client.request(INFER, HELD)
        while len(client.goaways) < 2:
            assert client.receive()
        finish_held(frontend)
        assert client.answer(held).status == 0
        client.until_closed()
        assert client.goaways == [frames.MAX_WINDOW, held]


@fake_clock
async def test_old_connection_that_does_not_end_is_cut_off() -> None:
    connection = FakeConnection()
    Lifetime(connection, Settings(grpc_max_connection_age=2000, grpc_max_connection_age_grace=3000))  # type: ignore[arg-type]
    await asyncio.sleep(4.9)
    assert connection.events == ["drain"]
    await asyncio.sleep(0.2)
    assert connection.events == ["drain", "NO_ERROR max_age"]


def test_old_connection_of_a_real_client_is_replaced_unnoticed():
    with Frontend(*models(), grpc_max_connection_age=5) as frontend:
        with grpc.insecure_channel(frontend.target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for number in range(300):
                assert text_of(stub.ModelInfer(text_request("echo", str(number)))) == str(number)


# TLS


def tls_settings(folder: Path) -> dict[str, object]:
    return {
        "grpc_use_ssl": True,
        "grpc_server_cert": str(folder / "server.pem"),
        "grpc_server_key": str(folder / "server.key"),
    }


def live_over_tls(frontend: Frontend, **credentials: bytes) -> bool:
    with grpc.secure_channel(frontend.target, grpc.ssl_channel_credentials(**credentials)) as channel:
        return service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest()).live


def test_tls(certificates):
    with Frontend(*models(), **tls_settings(certificates)) as frontend:
        assert live_over_tls(frontend, root_certificates=(certificates / "server.pem").read_bytes())
        context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
        context.set_alpn_protocols(["http/1.1", "h2"])
        with context.wrap_socket(socket.create_connection(frontend.address), server_hostname="127.0.0.1") as client:
            assert client.selected_alpn_protocol() == "h2"


def test_mutual_tls_wants_a_certificate(certificates):
    settings = {
        **tls_settings(certificates),
        "grpc_use_ssl_mutual": True,
        "grpc_root_cert": str(certificates / "client.pem"),
    }
    with Frontend(*models(), **settings) as frontend:
        root = (certificates / "server.pem").read_bytes()
        key, chain = [(certificates / f"client.{kind}").read_bytes() for kind in ("key", "pem")]
        assert live_over_tls(frontend, root_certificates=root, private_key=key, certificate_chain=chain)
        with pytest.raises(grpc.RpcError):
            live_over_tls(frontend, root_certificates=root)
        # A handshake that fails leaves nothing behind.
        frontend.until(lambda: not frontend.frontend.connections)


def test_large_messages_over_tls(certificates):
    with Frontend(*models(), **tls_settings(certificates)) as frontend:
        credentials = grpc.ssl_channel_credentials((certificates / "server.pem").read_bytes())
        options = [("grpc.max_receive_message_length", -1)]
        with grpc.secure_channel(frontend.target, credentials, options) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            text = "large" * 1_000_000
            assert text_of(stub.ModelInfer(text_request("echo", text))) == text
