"""Calls, connections and what they brought are gone when they have ended, however they end, without the collector."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator
from mmap import mmap

import pytest

from conch.core.inference import InferRequest
from conch.frontends.grpc.calls import Call, Outbox
from conch.frontends.grpc.messages import NOTHING_READ, MessageReader
from conch.frontends.grpc.server import Lifetime
from conch.http2 import Http2Connection, Http2ErrorCode, Http2Stream, frames
from conch.http2.frame_reader import Http2FrameReader
from conch.http2.frames import frame
from conch.http2.session import Http2Session
from tests.unit.frontends.grpc.conftest import models, text_request
from tests.unit.frontends.grpc.harness import Frontend
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, STREAM_INFER, RawClient, headers, message

pytestmark = pytest.mark.usefixtures("no_collector")

#: What belongs to one call, and what to a connection.
OF_CALLS = (Call, Http2Stream, InferRequest, MessageReader, Outbox, mmap)
OF_CONNECTIONS = (Http2Connection, Http2Session, Http2FrameReader, Lifetime)

BIG = text_request("echo", "x" * 1_500_000).SerializeToString()
#: A message that has memory of its own.
HUGE = text_request("echo", "x" * (17 << 20)).SerializeToString()


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    with Frontend(*models(), grpc_infer_response_compression_level="high") as frontend:
        yield frontend


def alive(kinds: tuple[type, ...]) -> list[object]:
    return [one for one in gc.get_objects() if isinstance(one, kinds) and one is not NOTHING_READ]


def upload(client: RawClient, data: bytes, path: str = INFER, *more: tuple[str, str], whole: bool = True) -> int:
    """Send a message as the server's windows allow; returns its stream."""
    stream = client.new_stream()
    client.send(client.head(stream, headers(path, *more)))
    end = len(data) if whole else len(data) // 2
    for number, at in enumerate(range(0, end, 200_000)):
        piece = data[at : min(at + 200_000, end)]
        last = whole and at + 200_000 >= end
        client.send(frame(frames.DATA, frames.END_STREAM if last else 0, stream, piece))
        client.ping(number.to_bytes(8, "big"))
    return stream


def answered(client: RawClient) -> None:
    assert client.answer(client.request(LIVE, b"")).status == 0
    assert client.answer(upload(client, message(BIG))).status == 0
    assert client.answer(upload(client, message(BIG), STREAM_INFER)).status == 0


def answered_huge(client: RawClient) -> None:
    assert client.answer(upload(client, message(HUGE))).status == 0


def answered_compressed(client: RawClient) -> None:
    accepted = ("grpc-accept-encoding", "gzip")
    assert client.answer(upload(client, message(BIG), INFER, accepted)).status == 0
    assert client.answer(upload(client, message(BIG), STREAM_INFER, accepted)).status == 0


def refused(client: RawClient) -> None:
    big = message(text_request("unknown", "x" * 1_500_000).SerializeToString())
    assert client.answer(upload(client, big)).status == 5
    assert client.answer(upload(client, message(b"\xff" * 1_100_000))).status == 13


def inflated(client: RawClient) -> None:
    gzip = zlib.compressobj(wbits=31)
    data = gzip.compress(BIG) + gzip.flush()
    for path in (INFER, STREAM_INFER):
        stream = client.new_stream()
        client.send(client.head(stream, headers(path, ("grpc-encoding", "gzip"))))
        client.send(frame(frames.DATA, frames.END_STREAM, stream, message(data, True)))
        assert client.answer(stream).status == 0


def given_up_by_the_client(client: RawClient) -> None:
    held = message(text_request("hold", "x" * 1_500_000).SerializeToString())
    for path in (INFER, STREAM_INFER):
        for whole in (True, False):
            stream = upload(client, held, path, whole=whole)
            client.send(frames.rst_stream(stream, Http2ErrorCode.CANCEL))


def too_late(client: RawClient) -> None:
    held = message(text_request("hold", "x" * 1_500_000).SerializeToString())
    assert client.answer(upload(client, held, INFER, ("grpc-timeout", "50m"))).status == 4


USES = [answered, answered_huge, answered_compressed, refused, inflated, given_up_by_the_client, too_late]


@pytest.mark.parametrize("use", USES)
def test_nothing_of_a_call_is_left_on_an_idle_connection(frontend: Frontend, use: Callable[[RawClient], None]) -> None:
    with frontend.client(initial_window_size=1 << 25) as client:
        client.send(frames.window_update(0, 1 << 30))
        use(client)
        client.ping(b"the end ")
        for model in frontend.server.models.values():
            frontend.call(model.received.clear)
            frontend.call(model.cancelled.clear)
        frontend.until(lambda: not frontend.budget.used and not alive(OF_CALLS))
        assert frontend.call(lambda: len(alive((Http2Connection,)))) == 1
    frontend.until(lambda: not alive(OF_CONNECTIONS))


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_left_of_clients_that_vanish(frontend: Frontend, whole: bool) -> None:
    held = message(text_request("hold", "x" * 1_500_000).SerializeToString())
    for path in (INFER, STREAM_INFER):
        client = frontend.client()
        upload(client, held, path, whole=whole)
        client.reset_connection()
    frontend.until(lambda: not frontend.frontend.connections)
    model = frontend.server.models["hold"]
    assert len(model.cancelled) == len(model.received) == (2 if whole else 0)
    model.received.clear()
    model.cancelled.clear()
    frontend.until(lambda: not frontend.budget.used and not alive(OF_CALLS + OF_CONNECTIONS))


@pytest.mark.parametrize("end", [b"not HTTP/2, by no means", frames.PREFACE + frame(frames.PING, 0, 0, bytes(8))])
def test_nothing_is_left_of_connections_that_failed(frontend: Frontend, end: bytes) -> None:
    with frontend.client(greet=False) as client:
        client.send(end)
        client.until_closed()
    frontend.until(lambda: not frontend.frontend.connections and not alive(OF_CONNECTIONS))
