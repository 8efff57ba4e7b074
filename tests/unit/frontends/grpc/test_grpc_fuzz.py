"""Whatever bytes come, a connection answers or ends; nothing raises, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.core.inference import InferRequest
from conch.frontends.budget import ByteBudget
from conch.frontends.grpc.calls import Call
from conch.frontends.grpc.server import http2_limits
from conch.frontends.grpc.service import GrpcService
from conch.frontends.limits import ClientLimits
from conch.frontends.loop_budget import EventLoopBudget
from conch.frontends.offloading.offloader import Offloader
from conch.http2 import ExceededLimit, Http2Connection, Http2Stream, frames
from conch.options.settings import Settings
from tests.fakes.transports import FakeTransport
from tests.unit.frontends.grpc.conftest import models, text_request
from tests.unit.frontends.grpc.fake_core import FakeServer
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, STREAM_INFER, headers, message


class Wire:
    """A connection over a transport in memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.server = FakeServer(Settings(), *models())
        self.lost: list[Http2Connection] = []
        self.transport = FakeTransport()
        offloader = Offloader(1 << 30, 30, ByteBudget(1 << 40))
        limits = ClientLimits(ByteBudget(1 << 40), loop=loop)
        # The clock stands still: the loop does not run, so no turn of it ends.
        limits.loop_budget = EventLoopBudget(loop, clock=lambda: 0.0)
        service = GrpcService(self.server, loop, offloader, limits)  # type: ignore[arg-type]
        self.connection = Http2Connection(service, loop, self, http2_limits(Settings(), limits))
        self.connection.connection_made(self.transport)

    def on_connection_made(self, connection: Http2Connection) -> None:
        pass

    def on_connection_lost(self, connection: Http2Connection) -> None:
        self.lost.append(connection)

    def on_limit_exceeded(self, limit: ExceededLimit) -> None:
        pass

    def hang_up(self) -> None:
        """What must hold at the end of any connection."""
        session = self.connection.session
        self.connection.connection_lost(None)
        assert self.lost == [self.connection]
        assert not session.streams
        for model in self.server.models.values():
            assert all(request.finished for request in model.received)


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(autouse=True)
def no_unhandled_exception(caplog):
    with caplog.at_level(logging.ERROR, logger="conch"):
        yield
    assert not [record for record in caplog.records if record.exc_info]


def blocks() -> st.SearchStrategy[bytes]:
    paths = st.sampled_from([INFER, STREAM_INFER, LIVE, "/x"])
    extra = st.lists(
        st.tuples(st.sampled_from(["grpc-timeout", "grpc-encoding", "te", "x", "x-bin"]), st.text(max_size=5))
    )
    return st.one_of(
        st.binary(max_size=60),
        st.builds(lambda path, more: hpack.Encoder().encode(headers(path, *more)), paths, extra),
    )


def bodies() -> st.SearchStrategy[bytes]:
    requests = [
        text_request(model, "x").SerializeToString() for model in ("echo", "hold", "misbehave", "hold_decoupled")
    ]
    return st.one_of(st.binary(max_size=40), st.sampled_from([message(one) for one in [b"", b"\xff", *requests]]))


def a_frame() -> st.SearchStrategy[bytes]:
    streams = st.sampled_from([0, 1, 1, 1, 2, 3, 3, 5, 7, 2**31 - 1])
    flags = st.one_of(st.sampled_from([0, 1, 4, 4, 5, 5]), st.integers(0, 255))
    small = st.binary(max_size=12)
    return st.one_of(
        st.builds(frames.frame, st.just(frames.HEADERS), flags, streams, blocks()),
        st.builds(frames.frame, st.just(frames.DATA), flags, streams, bodies()),
        st.builds(frames.frame, st.just(frames.CONTINUATION), flags, streams, blocks()),
        st.builds(frames.frame, st.integers(0, 12), flags, streams, small),
        st.builds(frames.window_update, streams, st.integers(0, 2**31 - 1)),
        st.builds(lambda key, value: frames.settings({key: value}), st.integers(0, 8), st.integers(0, 2**32 - 1)),
        st.builds(frames.rst_stream, streams, st.sampled_from(list(frames.Http2ErrorCode))),
    )


@settings(max_examples=400, deadline=None)
@given(data=st.lists(a_frame(), max_size=12), cut=st.integers(1, 50))
def test_any_frames_are_survived(loop, data, cut):
    wire = Wire(loop)
    sent = frames.PREFACE + frames.settings({}) + b"".join(data)
    for at in range(0, len(sent), cut):
        wire.connection.data_received(sent[at : at + cut])
    wire.hang_up()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), greet=st.booleans())
def test_any_bytes_are_survived(loop, data, greet):
    wire = Wire(loop)
    wire.connection.data_received((frames.PREFACE + frames.settings({}) if greet else b"") + data)
    wire.hang_up()


@settings(max_examples=200, deadline=None)
@given(data=st.lists(a_frame(), max_size=12), cut=st.integers(1, 500))
def test_pieces_do_not_matter(loop, data, cut):
    """The same answers come whether bytes arrive together or in pieces."""
    sent = frames.PREFACE + frames.settings({}) + b"".join(data)
    whole, pieces = Wire(loop), Wire(loop)
    whole.connection.data_received(sent)
    for at in range(0, len(sent), cut):
        pieces.connection.data_received(sent[at : at + cut])
    assert [model.received == [] for model in whole.server.models.values()] == [
        model.received == [] for model in pieces.server.models.values()
    ]
    assert whole.transport.closing == pieces.transport.closing
    whole.hang_up()
    pieces.hang_up()


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_request_message_is_survived(loop, data):
    wire = Wire(loop)
    body = frames.frame(frames.DATA, frames.END_STREAM, 1, message(data))
    block = hpack.Encoder().encode(headers(INFER))
    start = frames.PREFACE + frames.settings({})
    wire.connection.data_received(start + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block) + body)
    assert not wire.transport.closing
    wire.hang_up()


def test_calls_are_freed_without_the_garbage_collector(loop):
    """A cycle in every call would keep its tensors until a collection, and make collections long."""
    wire = Wire(loop)
    wire.connection.data_received(frames.PREFACE + frames.settings({}))
    encoder = hpack.Encoder()
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            path, model = ((INFER, "echo"), (STREAM_INFER, "echo"))[number % 2]
            stream = 2 * number + 1
            block = encoder.encode(headers(path, ("grpc-timeout", "10S")))
            body = message(text_request(model, "x").SerializeToString())
            wire.connection.data_received(
                frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)
                + frames.frame(frames.DATA, frames.END_STREAM, stream, body)
            )
        assert not wire.connection.session.streams
        wire.server.models["echo"].received.clear()
        alive = [one for one in gc.get_objects() if isinstance(one, (Call, Http2Stream, InferRequest))]
        assert alive == []
    finally:
        gc.enable()
    wire.hang_up()
