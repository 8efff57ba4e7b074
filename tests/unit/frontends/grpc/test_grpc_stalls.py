"""Clients that take too long, and clients that ping too often."""

from __future__ import annotations

from time import monotonic

import numpy as np
import pytest

from conch.frontends.grpc.server import ping_limits
from conch.http2 import Http2ErrorCode, frames
from conch.http2.frames import frame
from conch.http2.limits import PingStrikes
from conch.options.settings import Settings
from conch.telemetry.exposition import label_text
from conch.telemetry.traffic import CLOSED_CONNECTIONS
from tests.unit.frontends.grpc.conftest import array_request, models, text_request
from tests.unit.frontends.grpc.fake_core import echo
from tests.unit.frontends.grpc.harness import Frontend
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, STREAM_INFER, RawClient, headers, message

#: So long that a busy machine does not come near them.
FLAGS = {
    "head_timeout_secs": 1000,
    "body_timeout_secs": 2000,
    "unread_timeout_secs": 3000,
    "idle_timeout_secs": 10_000,
}


@pytest.fixture(scope="module")
def frontend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conch.frontends.grpc.server.SWEEP_SECONDS", 1e9)  # ``wait`` sweeps
        with Frontend(*models(), **FLAGS) as frontend:
            yield frontend


@pytest.fixture
def client(frontend):
    with frontend.client() as client:
        yield client


def wait(frontend: Frontend, *seconds: float) -> None:
    """What the sweeps see that come so much later, each."""
    now = monotonic()
    for later in seconds:
        frontend.call(frontend.frontend.sweep, now + later)


def closed(frontend: Frontend, reason: str) -> int:
    labels = label_text({"protocol": "grpc", "reason": reason})
    families = dict(frontend.call(lambda: list(frontend.limits.counts.families())))
    return sum(int(sample.value) for sample in families[CLOSED_CONNECTIONS] if sample.labels == labels)


def test_client_that_says_nothing_is_hung_up_on(frontend):
    before = closed(frontend, "head")
    with frontend.client(greet=False) as client:
        client.send(frames.PREFACE)
        frontend.until(lambda: frontend.frontend.connections)
        wait(frontend, 900)
        assert frontend.call(lambda: len(frontend.frontend.connections)) == 1
        wait(frontend, 1100)
        client.until_closed()
    assert closed(frontend, "head") == before + 1


@pytest.mark.parametrize(
    "half",
    [
        frame(frames.SETTINGS, 0, 0, bytes(6))[:5],
        frame(frames.HEADERS, 0, 1, b"\x83"),
        frame(frames.HEADERS, 0, 1, b"\x83") + frame(frames.CONTINUATION, 0, 1, b"\x86"),
    ],
)
def test_half_a_head_is_not_waited_for(frontend, client, half):
    client.ping()
    client.send(half)
    frontend.until(
        lambda: any(
            connection.reader.partial or connection.session.in_header_block
            for connection in frontend.frontend.connections
        )
    )
    wait(frontend, 0, 900)
    assert frontend.call(lambda: len(frontend.frontend.connections)) == 1
    wait(frontend, 1100)
    client.until_closed()
    assert client.goaway == (
        Http2ErrorCode.ENHANCE_YOUR_CALM,
        "the head of a request did not arrive within --head-timeout-secs",
    )


@pytest.mark.parametrize("path", [INFER, STREAM_INFER, LIVE])
def test_half_a_message_is_not_waited_for(frontend, client, path):
    before = closed(frontend, "body")
    stream = client.new_stream()
    client.send(client.head(stream, headers(path)) + frame(frames.DATA, 0, stream, message(bytes(100))[:50]))
    client.ping()
    wait(frontend, 0, 1900)
    assert not client.answers.get(stream)
    wait(frontend, 2100)
    answer = client.answer(stream)
    assert (answer.status, answer.headers["grpc-message"]) == (
        4,
        "the message did not arrive within --body-timeout-secs",
    )
    assert closed(frontend, "body") == before + 1
    # The connection stays usable.
    assert client.answer(client.request(LIVE, b"")).status == 0


def test_unary_call_without_any_message_is_not_waited_for(frontend, client):
    stream = client.new_stream()
    client.send(client.head(stream, headers(INFER)))
    client.ping()
    wait(frontend, 0, 2100)
    assert client.answer(stream).status == 4


def test_stream_between_two_messages_may_last(frontend, client):
    stream = client.new_stream()
    body = message(text_request("echo", "x").SerializeToString())
    client.send(client.head(stream, headers(STREAM_INFER)) + frame(frames.DATA, 0, stream, body))
    client.ping()
    wait(frontend, 0, 50000, 500000)
    client.send(frame(frames.DATA, frames.END_STREAM, stream, body))
    assert len(client.answer(stream).messages()) == 2


def test_each_message_of_a_stream_has_its_own_time(frontend, client):
    """Whenever somebody looks, part of one message is there: each came in time."""
    stream = client.new_stream()
    body = message(text_request("echo", "x").SerializeToString())
    client.send(client.head(stream, headers(STREAM_INFER)) + frame(frames.DATA, 0, stream, body[:9]))
    for number in range(1, 5):
        client.ping(b"ping %03d" % number)
        wait(frontend, 1500 * number)
        client.send(frame(frames.DATA, 0, stream, body[9:] + body[:9]))
    client.send(frame(frames.DATA, frames.END_STREAM, stream, body[9:]))
    assert len(client.answer(stream).messages()) == 5


def test_request_that_runs_is_not_taken_for_a_slow_client(frontend, client):
    stream = client.request(INFER, text_request("hold", "x").SerializeToString())
    client.ping()
    wait(frontend, 0, 50000, 500000)
    (request,) = [one for one in frontend.server.models["hold"].received if not one.finished]
    frontend.call(echo, request)
    assert client.answer(stream).status == 0


def test_message_that_makes_progress_may_take_longer(frontend, client):
    stream = client.new_stream()
    body = message(array_request("fp32", np.zeros(50_000, np.float32)).SerializeToString())
    client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, body[:100]))
    client.ping()
    wait(frontend, 0)
    client.send(frame(frames.DATA, 0, stream, body[100:190_000]))
    client.ping(b"second  ")
    wait(frontend, 2001)
    assert not client.answers.get(stream)
    wait(frontend, 2100)
    assert client.answer(stream).status == 4


def test_answer_that_is_not_read_is_cancelled(frontend):
    before = closed(frontend, "unread")
    with frontend.client(initial_window_size=100) as client:
        stream = client.request(INFER, text_request("echo", "x" * 1000).SerializeToString())
        client.ping()
        wait(frontend, 0, 2900)
        assert client.answers[stream].reset is None
        wait(frontend, 3100)
        assert client.answer(stream).reset == Http2ErrorCode.CANCEL
        assert client.answer(client.request(LIVE, b"")).status == 0
        assert frontend.budget.used == 0
    assert closed(frontend, "unread") == before + 1


def test_connection_whose_client_reads_nothing_is_cut(frontend):
    with frontend.client(initial_window_size=1 << 30) as client:
        client.send(frames.window_update(0, 1 << 30))
        for _ in range(200):
            client.request(INFER, text_request("echo", "x" * 100_000).SerializeToString())
        frontend.until(lambda: any(connection.writer.paused for connection in frontend.frontend.connections))
        wait(frontend, 0, 2900)
        assert frontend.call(lambda: len(frontend.frontend.connections)) == 1
        wait(frontend, 3100)
        frontend.until(lambda: not frontend.frontend.connections)
        assert frontend.budget.used == 0


def test_idle_connection_is_sent_away(frontend, client):
    assert client.answer(client.request(LIVE, b"")).status == 0
    wait(frontend, 0, 9900)
    client.ping()
    assert client.goaway is None
    wait(frontend, 10100)
    client.until_closed()
    assert client.goaway[0] == Http2ErrorCode.NO_ERROR
    assert closed(frontend, "idle") >= 1


def test_idle_client_that_does_not_go_is_hung_up_on(frontend, client):
    client.answer_pings = False
    client.ping()
    wait(frontend, 0, 10100, 11200)
    client.until_closed()
    assert client.goaway == (Http2ErrorCode.NO_ERROR, "max_idle")


def test_connection_with_calls_now_and_then_is_not_idle(frontend, client):
    wait(frontend, 0)
    assert client.answer(client.request(LIVE, b"")).status == 0
    wait(frontend, 9900, 15000)
    client.ping()
    assert client.goaway is None


# Pings


def strikes(**flags: int) -> PingStrikes:
    return PingStrikes(ping_limits(Settings(**flags)))


def test_early_pings_are_strikes():
    pings = strikes()
    # The first is free, two strikes are forgiven.
    assert [pings.are_too_many(at, calls=True) for at in (0.0, 299.0, 598.0, 897.0)] == [False, False, False, True]


def test_pings_in_time_are_no_strikes():
    pings = strikes()
    assert not any(pings.are_too_many(at * 300.0, calls=True) for at in range(20))


def test_pings_without_calls_must_be_hours_apart():
    pings = strikes()
    assert [pings.are_too_many(at * 3600.0, calls=False) for at in range(4)] == [False, False, False, True]
    pings = strikes(grpc_keepalive_permit_without_calls=True)
    assert not any(pings.are_too_many(at * 300.0, calls=False) for at in range(20))


def test_strikes_can_be_unlimited():
    pings = strikes(grpc_http2_max_ping_strikes=0)
    assert not any(pings.are_too_many(0.0, calls=True) for _ in range(1000))


def test_client_that_pings_too_often_is_told_so():
    with Frontend(*models(), grpc_http2_max_ping_strikes=2) as frontend, frontend.client() as client:
        assert _pings_until_goaway(client) == 3
        assert client.goaway == (Http2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        assert closed(frontend, "pings") == 1


def test_pings_around_answers_are_allowed():
    with Frontend(*models(), grpc_http2_max_ping_strikes=2) as frontend, frontend.client() as client:
        for number in range(20):
            assert client.answer(client.request(LIVE, b"")).status == 0
            client.ping(number.to_bytes(8, "big"))
        assert client.goaway is None


def _pings_until_goaway(client: RawClient) -> int:
    for number in range(10):
        client.ping(number.to_bytes(8, "big"))
        if client.goaway:
            return number
    return 10
