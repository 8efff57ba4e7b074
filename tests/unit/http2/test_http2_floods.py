"""Frames in number that make work for nothing, and those of real clients that must not be taken for them."""

from __future__ import annotations

import pytest

from conch.http2 import Http2ErrorCode, frames, limits
from conch.http2.frames import frame
from tests.unit.frontends.grpc.http2_calls import infer_request, infer_size, is_live
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, RawClient, headers, message


def flood(client: RawClient, data: bytes, times: int) -> None:
    try:
        for _ in range(0, times, 1000):
            client.send(data * 1000)
    except ConnectionError:
        pass
    client.until_closed()


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("SETTINGS frames", frames.settings({})),
        ("PING frames", frame(frames.PING, 0, 0, bytes(8))),
        ("frames without use", frame(frames.PRIORITY, 0, 1, bytes(5))),
        ("frames without use", frame(0x77, 0, 0)),
    ],
)
def test_flood_is_stopped(client, what, data):
    flood(client, data, 200_000)
    assert client.goaway in [(Http2ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}"), None]
    assert client.closed


def test_flood_of_empty_data_is_stopped(client):
    stream = client.new_stream()
    client.send(client.head(stream, headers(INFER)))
    flood(client, frame(frames.DATA, 0, stream), 100_000)
    assert client.closed


def test_rapid_resets_are_stopped_and_leave_no_request_behind(frontend, client):
    model = frontend.server.models["hold"]
    before = len(model.received)
    block = headers(INFER)
    body = message(infer_request(1, "hold"))
    try:
        for _ in range(40):
            batch = b""
            for _ in range(500):
                stream = client.new_stream()
                batch += client.head(stream, block) + frame(frames.DATA, frames.END_STREAM, stream, body)
                batch += frames.rst_stream(stream, Http2ErrorCode.CANCEL)
            client.send(batch)
    except ConnectionError:
        pass
    client.until_closed()
    assert client.closed
    assert len(model.received) - before < 20_000
    assert all(request.finished for request in model.received)


def test_continuation_bomb_is_stopped(client):
    client.send(frame(frames.HEADERS, 0, 1, b"\x83") + frame(frames.CONTINUATION, 0, 1) * limits.MAX_CONTINUATIONS)
    client.until_closed()
    assert client.goaway == (Http2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")


def test_header_list_bomb_is_stopped(client):
    """A few bytes that mean many: one large entry of the dynamic table, named again and again."""
    entry = b"\x40\x01x\x7f\x81\x1e" + b"y" * 4000
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, entry + b"\xbe" * 1000))
    client.until_closed()
    assert client.goaway == (Http2ErrorCode.ENHANCE_YOUR_CALM, "header list too large")


def test_pings_of_real_clients_are_no_flood(client):
    for number in range(3000):
        client.send(frame(frames.PING, 0, 0, number.to_bytes(8, "big")) + frames.window_update(0, 1))
    assert is_live(client)


FLOODS = {
    "window updates of one byte": lambda stream: frames.window_update(0, 1) + frames.window_update(stream, 1),
    "data of one byte": lambda stream: frame(frames.DATA, 0, stream, b"\0"),
    "resets of streams that are gone": lambda stream: frames.rst_stream(stream - 2, Http2ErrorCode.CANCEL),
}


@pytest.mark.parametrize("make", FLOODS.values(), ids=FLOODS)
def test_flood_of_frames_without_use_is_stopped(client, make):
    assert is_live(client)
    stream = client.new_stream()
    # A long message, to which the single bytes belong.
    client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, message(bytes(200_000))[:64]))
    flood(client, make(stream), 100_000)
    assert client.goaway in [(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many frames without use"), None]
    assert client.closed


def test_streams_that_the_server_has_to_reset_are_stopped(client):
    """MadeYouReset: every request is followed by a frame for which the server must reset it."""
    body = message(infer_request(1, "hold"))
    try:
        for _ in range(20):
            batch = b""
            for _ in range(500):
                stream = client.new_stream()
                batch += client.head(stream, headers(INFER)) + frame(frames.DATA, frames.END_STREAM, stream, body)
                batch += frames.window_update(stream, 0)
            client.send(batch)
    except ConnectionError:
        pass
    client.until_closed()
    assert client.goaway in [(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many stream resets"), None]


def test_calls_that_clients_gave_up_after_a_while_are_no_flood(client, monkeypatch):
    """Those of a server that is overloaded, whose clients have deadlines."""
    monkeypatch.setattr(limits, "SUDDEN", 0.0)  # a while is over at once
    body = message(infer_request(1, "hold"))
    for _ in range(10):
        streams = [client.new_stream() for _ in range(500)]
        for stream in streams:
            client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, frames.END_STREAM, stream, body))
        client.send(b"".join(frames.rst_stream(stream, Http2ErrorCode.CANCEL) for stream in streams))
    assert is_live(client)


def test_client_that_reads_in_small_steps_is_no_flood(frontend):
    """Many window updates are plausible where much was sent."""
    with frontend.client(initial_window_size=4096) as client:
        client.send(frames.window_update(0, 1 << 30))
        for _ in range(60):
            stream = client.request(INFER, infer_request(200_000))
            received = 0
            while not (answer := client.answers.get(stream)) or not answer.ended:
                assert client.receive(), client.goaway
                if answer is not None and (new := len(answer.data) - received):
                    received += new
                    client.send(
                        b"".join([frames.window_update(stream, min(500, new - at)) for at in range(0, new, 500)])
                    )
            assert infer_size(answer) == 200_000


def test_each_setting_is_applied_once_in_a_frame(client, frontend):
    held = [client.request(INFER, infer_request(1, "hold")) for _ in range(3)]
    client.ping()
    (session,) = [connection.session for connection in frontend.frontend.connections if connection.session.streams]
    sizes = [(frames.INITIAL_WINDOW_SIZE, 1000 + number) for number in range(2000)]
    client.send(frame(frames.SETTINGS, 0, 0, b"".join([frames.SETTING.pack(*size) for size in sizes])))
    client.ping(b"second  ")
    assert [session.streams[stream].send_window for stream in held] == [2999] * 3


def test_setting_that_a_later_one_replaces_is_checked_too(client):
    client.send(
        frame(
            frames.SETTINGS,
            0,
            0,
            frames.SETTING.pack(frames.ENABLE_PUSH, 2) + frames.SETTING.pack(frames.ENABLE_PUSH, 0),
        )
    )
    client.until_closed()
    assert client.goaway[0] == Http2ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("kind", [frames.SETTINGS, frames.PING, frames.GOAWAY, frames.WINDOW_UPDATE, 0x77])
def test_frame_other_than_data_is_small(client, kind):
    client.send(frames.FRAME.pack((limits.MAX_CONTROL_FRAME + 6) << 8 | kind, 0, 0))
    client.until_closed()
    assert client.goaway == (Http2ErrorCode.FRAME_SIZE_ERROR, "control frame too large")


def test_large_metadata_refuses_the_call_alone(client):
    more = [(f"x-{number}", "~" * 1000) for number in range(60)]
    stream = client.new_stream()
    client.send(client.head(stream, headers(LIVE, *more), end=True))
    answer = client.answer(stream)
    assert answer.status == 8
    assert "received metadata of" in answer.headers["grpc-message"]
    # The dynamic table is still that of the client.
    assert is_live(client)
    assert is_live(client)
