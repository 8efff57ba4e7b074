"""Channels that send, against a bare socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

import hpack
import pytest
import uvloop
from tritonclient.grpc import service_pb2

from conch.http2 import frames
from conch.measure.perf.requests.payload import Payload
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.channels.grpc import GrpcChannel, Rpc, StreamChannel
from conch.measure.perf.senders.channels.http import HttpChannel
from conch.measure.perf.senders.records import CallChannel, Outcome, TimedCall
from tests.events import TIMEOUT
from tests.fakes.transports import FakeTransport

MakeChannel = Callable[[asyncio.AbstractEventLoop, Address], CallChannel]
CHANNELS: list[MakeChannel] = [HttpChannel, lambda loop, address: GrpcChannel(loop, address, Rpc("/method"))]


def _call(data: bytes, on_end: Callable[[TimedCall], None]) -> TimedCall:
    call = TimedCall(0, on_end)
    call.payload = Payload(data)
    return call


def _answers(*streams: int) -> bytes:
    """The ends of gRPC calls that went well."""
    blocks = [hpack.Encoder().encode([(b":status", b"200"), (b"grpc-status", b"0")]) for _ in streams]
    return b"".join(
        frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, block)
        for stream, block in zip(streams, blocks, strict=True)
    )


def test_calls_that_start_together_are_written_each_by_itself() -> None:
    """Callers are independent: two answers that come at once must not make one burst of the next two requests."""
    received = []

    async def start(listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        channel = GrpcChannel(loop, Address(*listener.getsockname()), Rpc("/method"))
        over = loop.create_future()

        def again(call: TimedCall) -> None:
            assert call.outcome is Outcome.OK
            call.begin(0)
            channel.send(call)
            received.append((peer.recv(65536)[-6:], call.written >= call.sent > 0))
            if len(received) == 2:
                over.set_result(None)

        channel.send(_call(b"first.", again))
        channel.send(_call(b"second", again))
        peer, _ = await asyncio.to_thread(listener.accept)
        with peer:
            while b"second" not in await asyncio.to_thread(peer.recv, 65536):
                pass
            peer.setblocking(False)
            peer.sendall(_answers(1, 3))
            await over
            channel.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        uvloop.run(asyncio.wait_for(start(listener), TIMEOUT))
    assert received == [(b"first.", True), (b"second", True)]


def test_a_server_may_speak_first() -> None:
    """As the real Triton does: it must not get an answer before the connection's preface."""
    loop = asyncio.new_event_loop()
    channel = GrpcChannel(loop, Address("host", 1), Rpc("/method"))
    transport = FakeTransport()
    channel.connection_made(transport)
    channel.data_received(frames.settings({}))
    assert transport.written.startswith(frames.PREFACE)
    assert transport.written.endswith(frames.frame(frames.SETTINGS, frames.ACK, 0))
    loop.close()


def _padded(stream: int, part: bytes) -> bytes:
    return frames.frame(frames.DATA, frames.PADDED, stream, bytes([7]) + part + bytes(7))


@pytest.mark.parametrize("kind", [GrpcChannel, partial(StreamChannel, decoupled=False)], ids=["calls", "stream"])
def test_answers_in_padded_frames_are_read_without_the_padding(kind: Callable[..., GrpcChannel]) -> None:
    """Whatever its reason, a server may pad any frame."""
    loop = asyncio.new_event_loop()
    seen: list[bytes] = []
    outcomes: list[Outcome] = []

    def judge(payload: int, answer: bytes, json_size: int = 0) -> str:
        seen.append(answer)
        return ""

    channel = kind(loop, Address("host", 1), Rpc("/method"), judge)
    channel.connection_made(FakeTransport())
    channel.send(_call(bytes(16), lambda call: outcomes.append(call.outcome)))
    response = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=[bytes(range(200))])
    streamed = service_pb2.ModelStreamInferResponse(infer_response=response)
    message = (streamed if isinstance(channel, StreamChannel) else response).SerializeToString()
    message = b"\0" + len(message).to_bytes(4, "big") + message
    channel.data_received(_padded(1, message[:50]) + _padded(1, b"") + _padded(1, message[50:]))
    if not isinstance(channel, StreamChannel):
        channel.data_received(_answers(1))
    assert outcomes == [Outcome.OK] and seen == [response.SerializeToString()]
    loop.close()


@pytest.mark.parametrize("make", CHANNELS, ids=["http", "grpc"])
def test_a_large_request_is_written_when_its_last_byte_is(make: MakeChannel) -> None:
    """As long as the server doesn't read, it is not."""
    size = 32 << 20

    async def start(listener: socket.socket) -> None:
        channel = make(asyncio.get_running_loop(), Address(*listener.getsockname()))
        call = _call(bytes(size), lambda call: None)
        channel.send(call)
        peer, _ = await asyncio.to_thread(listener.accept)
        with peer:
            if isinstance(channel, GrpcChannel):  # room for all of it
                peer.sendall(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7F, 0xFF, 0xFF, 0xFF]))
                peer.sendall(bytes([0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7F, 0, 0, 0]))
            read = await asyncio.to_thread(peer.recv, 1)
            assert read and call.sent and not call.written
            while not call.written:
                read = await asyncio.to_thread(peer.recv, 1 << 20)
                assert read
            channel.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        uvloop.run(asyncio.wait_for(start(listener), TIMEOUT))
