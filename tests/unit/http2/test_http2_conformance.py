"""The rules of RFC 9113 that h2spec checks, and what gRPC asks besides: one test for each rule that can be broken.

Those of frames that end the connection are in ``test_http2_frames.py`` (BROKEN_RULES), most of malformed heads as well.
"""

from __future__ import annotations

import pytest

from conch.http2 import Http2ErrorCode, frames
from conch.http2.frames import frame
from tests.unit.frontends.grpc.conftest import text_request
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, RawClient, headers, message


def is_live(client: RawClient) -> bool:
    return client.answer(client.request(LIVE, b"")).status == 0


def body(stream: int, data: bytes = message(b""), flags: int = frames.END_STREAM) -> bytes:
    return frame(frames.DATA, flags, stream, data)


def reset_code(client: RawClient, stream: int, data: bytes) -> int | None:
    """The code with which a stream is reset while the connection continues."""
    client.send(data)
    answer = client.answer(stream)
    assert is_live(client)
    return answer.reset


def goaway_code(client: RawClient, data: bytes) -> int:
    """What the connection ends with."""
    client.send(data)
    client.until_closed()
    assert client.goaway is not None
    return client.goaway[0]


# 5.1: the states of streams


def test_frames_on_idle_streams_end_the_connection(frontend):
    for data in (
        frames.rst_stream(1, Http2ErrorCode.CANCEL),
        frames.window_update(1, 1),
        body(1),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"\x83"),
    ):
        with frontend.client() as client:
            assert goaway_code(client, data) == Http2ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("late", ["data", "headers"])
def test_half_closed_stream_takes_nothing_more(client, late):
    stream = client.request(INFER, text_request("hold", "x").SerializeToString())
    data = body(stream) if late == "data" else client.head(stream, [("x", "1")], end=True)
    assert reset_code(client, stream, data) == Http2ErrorCode.STREAM_CLOSED


def test_closed_stream_takes_window_updates_resets_and_priorities(client):
    stream = client.request(LIVE, b"")
    assert client.answer(stream).status == 0
    client.send(frames.window_update(stream, 1) + frames.rst_stream(stream, Http2ErrorCode.CANCEL))
    client.send(frame(frames.PRIORITY, 0, stream, bytes(4) + b"\x10"))
    assert is_live(client)


def test_closed_stream_cannot_be_opened_again(client):
    stream = client.request(LIVE, b"")
    client.answer(stream)
    assert goaway_code(client, client.head(stream, headers())) == Http2ErrorCode.PROTOCOL_ERROR


def test_streams_are_opened_in_order(client):
    client.send(client.head(5, headers(), end=True))
    assert goaway_code(client, client.head(3, headers(), end=True)) == Http2ErrorCode.PROTOCOL_ERROR


# 5.3: priorities


def test_priority_of_a_stream_on_itself_is_harmless(client):
    """RFC 9113 has done away with priorities: what they say is ignored."""
    client.send(frame(frames.PRIORITY, 0, 1, (1).to_bytes(4, "big") + b"\x10"))
    assert is_live(client)


# 6.1 and 6.2: padding


@pytest.mark.parametrize("kind", [frames.DATA, frames.HEADERS])
def test_padding_as_long_as_the_frame_ends_the_connection(client, kind):
    client.send(client.head(1, headers(INFER)))
    stream = 1 if kind == frames.DATA else 3
    data = frame(kind, frames.PADDED | frames.END_HEADERS, stream, b"\x06" + b"abcde")
    assert goaway_code(client, data) == Http2ErrorCode.PROTOCOL_ERROR


def test_padding_may_be_all_of_a_frame(client):
    client.send(client.head(1, headers()) + frame(frames.DATA, frames.PADDED, 1, b"\x05" + bytes(5)) + body(1))
    assert client.answer(1).status == 0


# 6.5: settings


def test_unknown_settings_and_those_for_servers_are_taken(client):
    client.send(frames.settings({frames.ENABLE_PUSH: 1, frames.MAX_CONCURRENT_STREAMS: 0, 0xFFFF: 5}))
    assert is_live(client)
    assert client.settings_acks == 2


@pytest.mark.parametrize("value", [16_384, (1 << 24) - 1])
def test_frame_sizes_at_the_limits_are_taken(client, value):
    client.send(frames.settings({frames.MAX_FRAME_SIZE: value}))
    assert is_live(client)


# 6.7 and 6.8: PING and GOAWAY


def test_answer_to_a_ping_is_not_answered(client):
    client.send(frame(frames.PING, frames.ACK, 0, b"whatever"))
    assert is_live(client)
    assert b"whatever" not in client.pongs


def test_client_that_sent_goaway_still_gets_its_responses(client):
    stream = client.new_stream()
    client.send(client.head(stream, headers()) + frames.goaway(0, Http2ErrorCode.NO_ERROR) + body(stream))
    assert client.answer(stream).status == 0


# 6.9: flow control


def test_window_update_by_nothing_resets_the_stream(client):
    stream = client.request(INFER, text_request("hold", "x").SerializeToString())
    assert reset_code(client, stream, frames.window_update(stream, 0)) == Http2ErrorCode.FLOW_CONTROL_ERROR


def test_window_that_overflows_resets_the_stream(client):
    stream = client.request(INFER, text_request("hold", "x").SerializeToString())
    data = frames.window_update(stream, frames.MAX_WINDOW)
    assert reset_code(client, stream, data) == Http2ErrorCode.FLOW_CONTROL_ERROR


def test_initial_window_that_makes_a_window_overflow_ends_the_connection(client):
    stream = client.request(INFER, text_request("hold", "x").SerializeToString())
    client.send(frames.window_update(stream, frames.MAX_WINDOW - frames.DEFAULT_WINDOW))
    data = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.DEFAULT_WINDOW + 1})
    assert goaway_code(client, data) == Http2ErrorCode.FLOW_CONTROL_ERROR


# 6.10: CONTINUATION


def split_head(client: RawClient, flags: int = 0) -> tuple[bytes, bytes]:
    block = client.encoder.encode(headers())
    return frame(frames.HEADERS, flags, 1, block[:5]), block[5:]


def test_headers_may_be_continued(client):
    first, rest = split_head(client)
    client.send(
        first
        + frame(frames.CONTINUATION, 0, 1, rest[:3])
        + frame(frames.CONTINUATION, 0, 1)
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, rest[3:])
        + body(1)
    )
    assert client.answer(1).status == 0


@pytest.mark.parametrize(
    "between",
    [
        frame(frames.CONTINUATION, frames.END_HEADERS, 3, b"\x83"),
        frame(frames.HEADERS, frames.END_HEADERS, 3, b"\x83"),
        frame(frames.DATA, 0, 1, b"x"),
        frame(0x77, 0, 1),
        frames.settings({}),
    ],
)
def test_nothing_comes_between_headers_and_their_continuation(client, between):
    first, _ = split_head(client)
    assert goaway_code(client, first + between) == Http2ErrorCode.PROTOCOL_ERROR


def test_continuation_behind_the_end_ends_the_connection(client):
    data = client.head(1, headers()) + frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"\x83")
    assert goaway_code(client, data) == Http2ErrorCode.PROTOCOL_ERROR


# 8.1: messages


MALFORMED_TRAILERS = {
    "pseudo-field": [(":path", "/x")],
    "upper case": [("X-Upper", "1")],
    "connection": [("connection", "close")],
}


@pytest.mark.parametrize("fields", MALFORMED_TRAILERS.values(), ids=MALFORMED_TRAILERS)
def test_malformed_trailers_reset_the_stream(client, fields):
    stream = client.new_stream()
    data = client.head(stream, headers(INFER)) + client.head(stream, fields, end=True)
    assert reset_code(client, stream, data) == Http2ErrorCode.PROTOCOL_ERROR


MALFORMED = {
    "empty path": headers(""),
    "twice a method": [(":method", "POST"), *headers()],
    "twice a scheme": [(":scheme", "http"), *headers()],
    "of a response": [(":status", "200"), *headers()],
    "unknown": [(":x", "1"), *headers()],
    "behind others": [*headers(), (":path", LIVE)],
    "proxy-connection": headers(LIVE, ("proxy-connection", "x")),
    "keep-alive": headers(LIVE, ("keep-alive", "x")),
    "transfer-encoding": headers(LIVE, ("transfer-encoding", "chunked")),
    "upgrade": headers(LIVE, ("upgrade", "x")),
    "colon in a name": headers(LIVE, ("a:b", "x")),
    "null in a value": headers(LIVE, ("a", "x\0y")),
    "content-length that is none": headers(LIVE, ("content-length", "-1")),
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
def test_malformed_head_resets_the_stream(client, fields):
    stream = client.new_stream()
    data = client.head(stream, fields) + body(stream)
    assert reset_code(client, stream, data) == Http2ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("length", [0, 4, 6, 10**17])
@pytest.mark.parametrize("end", ["data", "empty data", "trailers"])
def test_body_of_another_length_than_announced_resets_the_stream(client, length, end):
    request = message(text_request("hold", "x").SerializeToString())
    stream = client.new_stream()
    head = client.head(stream, headers(INFER, ("content-length", str(length and len(request) - 5 + length))))
    if end == "data":
        sent = body(stream, request)
    elif end == "empty data":
        sent = body(stream, request, 0) + body(stream, b"")
    else:
        sent = body(stream, request, 0) + client.head(stream, [("x", "1")], end=True)
    assert reset_code(client, stream, head + sent) == Http2ErrorCode.PROTOCOL_ERROR


def test_headers_alone_with_a_length_reset_the_stream(client):
    stream = client.new_stream()
    data = client.head(stream, headers(INFER, ("content-length", "5")), end=True)
    assert reset_code(client, stream, data) == Http2ErrorCode.PROTOCOL_ERROR


def test_length_that_is_right_is_served(client):
    stream = client.new_stream()
    client.send(client.head(stream, headers(LIVE, ("content-length", "5"))) + body(stream))
    assert client.answer(stream).status == 0


# 4.2 and 4.3: frame sizes, header blocks


def test_frame_of_the_greatest_size_is_taken(client):
    client.send(frame(frames.PRIORITY, 0, 1, bytes(5)) + frame(0x99, 0, 0, bytes(16_384)))
    assert is_live(client)


def test_block_of_a_refused_request_keeps_the_table(client):
    """A head that is refused may have changed the table on which the next one depends."""
    stream = client.new_stream()
    fields = headers("", ("x-new", "value"))
    client.send(client.head(stream, fields) + body(stream))
    assert client.answer(stream).reset == Http2ErrorCode.PROTOCOL_ERROR
    assert client.answer(client.request(LIVE, b"", ("x-new", "value"))).status == 0
