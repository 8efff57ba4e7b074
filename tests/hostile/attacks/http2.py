"""HTTP/2 connections that make the gRPC port do useless work, or work without pause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic

import hpack
from tritonclient.grpc import service_pb2 as pb

from conch.http2 import Http2ErrorCode, frames
from tests.conftest import Server
from tests.hostile.attack import attack
from tests.hostile.http2_client import INFER, LIVE, STREAM_INFER, Http2Client, message

_SECONDS = 1.0


def small_request() -> bytes:
    """Return a valid request of about 60 bytes to ``identity_string``."""
    request = pb.ModelInferRequest(model_name="identity_string")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(b"\x01\0\0\0x")
    return message(request.SerializeToString())


@attack("one stream of small valid `ModelStreamInfer` requests, 8.5 MB unpaced")
def unpaced_stream(server: Server, stack: ExitStack) -> None:
    client = stack.enter_context(Http2Client(server.grpc))
    stream, head = client.open(STREAM_INFER)
    client.send(head)
    client.send_data(stream, small_request() * 120_000)
    client.wait_answered(stream, 1 << 60, _SECONDS)
    client.close()


@attack("1,000 open streams, then one SETTINGS frame of 120 kB with 20,000 initial window sizes")
def settings_for_a_thousand_streams(server: Server, stack: ExitStack) -> None:
    client = stack.enter_context(Http2Client(server.grpc))
    client.send(b"".join([client.open(INFER)[1] for _ in range(1000)]))
    sizes = b"".join([frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 65_535 + i % 2) for i in range(20_000)])
    client.send(frames.frame(frames.SETTINGS, 0, 0, sizes))
    _, head = client.open(LIVE)
    client.send(head)
    client.wait_ended(1, _SECONDS)


def _flood(server: Server, stack: ExitStack, flood: bytes, path: str = INFER) -> None:
    """Send the same frames to a stream again and again; open a new connection whenever the server closes one."""
    until = monotonic() + _SECONDS
    while monotonic() < until:
        client = stack.enter_context(Http2Client(server.grpc))
        _, head = client.open(path)
        client.send(head)
        while monotonic() < until and client.send(flood):
            pass
        client.close()


@attack("a flood of WINDOW_UPDATE frames that add one byte")
def window_updates_of_one(server: Server, stack: ExitStack) -> None:
    _flood(server, stack, (frames.window_update(0, 1) + frames.window_update(1, 1)) * 2000)


@attack("a flood of DATA frames with one byte each")
def data_of_one_byte(server: Server, stack: ExitStack) -> None:
    until = monotonic() + _SECONDS
    while monotonic() < until:
        client = stack.enter_context(Http2Client(server.grpc))
        for _ in range(20):
            stream, head = client.open(INFER)
            body = [frames.frame(frames.DATA, 0, stream, byte) for byte in (b"\0", b"\0", b"\1", b"\0", b"\0")]
            body += [frames.frame(frames.DATA, 0, stream, b"x")] * 40_000
            if not client.send(head + b"".join(body)) or monotonic() > until:
                break
        client.close()


@attack("requests that are reset at once, with new connections (rapid reset)")
def rapid_reset(server: Server, stack: ExitStack) -> None:
    _requests_followed_by(server, stack, lambda stream: frames.rst_stream(stream, Http2ErrorCode.CANCEL))


@attack("requests that the server has to reset, with new connections (MadeYouReset)")
def made_you_reset(server: Server, stack: ExitStack) -> None:
    _requests_followed_by(server, stack, lambda stream: frames.window_update(stream, 0))


def _requests_followed_by(server: Server, stack: ExitStack, frame_for: Callable[[int], bytes]) -> None:
    """Send requests, each followed by a frame for its stream, on one connection after the other."""
    body = small_request()
    until = monotonic() + _SECONDS
    while monotonic() < until:
        client = stack.enter_context(Http2Client(server.grpc))
        while monotonic() < until:
            batch = []
            for _ in range(200):
                stream, head = client.open(INFER)
                batch += [head, frames.frame(frames.DATA, frames.END_STREAM, stream, body), frame_for(stream)]
            if not client.send(b"".join(batch)):
                break
        client.close()


@attack("300 requests with 28 kB of metadata in Huffman code")
def huffman_metadata(server: Server, stack: ExitStack) -> None:
    client = stack.enter_context(Http2Client(server.grpc))
    # Encoded once, because Huffman coding takes the client longer than the server.
    metadata = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple("x-metadata", "a" * 28_000)])
    heads = []
    for number in range(300):
        _, head = client.open(LIVE, ("x-number", f"{number:05d}"), indexed=False, end=True, encoded=metadata)
        heads.append(head)
    client.send(b"".join(heads))
    client.wait_ended(300, 10)


@attack("60 kB of metadata, a hundred times")
def large_metadata(server: Server, stack: ExitStack) -> None:
    client = stack.enter_context(Http2Client(server.grpc))
    fields = [hpack.NeverIndexedHeaderTuple(f"x-{number}", "~" * 1000) for number in range(60)]
    metadata = hpack.Encoder().encode(fields)
    for _ in range(100):
        _, head = client.open(LIVE, indexed=False, end=True, encoded=metadata)
        client.send(head)
    client.wait_ended(100, 10)
