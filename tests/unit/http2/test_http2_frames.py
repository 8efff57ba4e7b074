"""The HTTP/2 connection, seen by a client that follows or breaks every rule by hand."""

from __future__ import annotations

import pytest

from conch.http2 import Http2ErrorCode, frames, limits
from conch.http2.frames import frame
from tests.unit.frontends.grpc.http2_calls import LIVE_ANSWER, infer_request, infer_size, is_live
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, headers, message


def test_settings_are_acknowledged_and_sent(client):
    client.ping()
    assert client.settings_acks == 1
    assert client.settings[frames.MAX_CONCURRENT_STREAMS] == limits.MAX_STREAMS
    assert client.settings[frames.INITIAL_WINDOW_SIZE] == limits.STREAM_WINDOW


def test_connection_is_served_byte_by_byte(frontend):
    with frontend.client(greet=False) as client:
        bytes_sent = (
            frames.PREFACE
            + frames.settings({})
            + client.head(1, headers())
            + frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, b"\x03" + message(b"") + b"pad")
        )
        for byte in bytes_sent:
            client.send(bytes([byte]))
        assert client.answer(1).messages() == [LIVE_ANSWER]


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"\0"])
def test_what_is_not_http2_is_hung_up_on(frontend, greeting):
    with frontend.client(greet=False) as client:
        client.send(greeting)
        client.until_closed()
        assert client.goaway == (Http2ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 client")


def test_first_frame_must_be_settings(frontend):
    with frontend.client(greet=False) as client:
        client.send(frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)))
        client.until_closed()
        assert client.goaway[0] == Http2ErrorCode.PROTOCOL_ERROR


def test_header_block_may_be_padded_prioritised_and_continued(client):
    block = client.encoder.encode(headers())
    first = b"\x05" + bytes(5) + block[:10] + b"#####"
    client.send(
        frame(frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, 1, first)
        + frame(frames.CONTINUATION, 0, 1, block[10:12])
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[12:])
        + frame(frames.DATA, frames.END_STREAM, 1, message(b""))
    )
    assert client.answer(1).messages() == [LIVE_ANSWER]


def test_request_ends_with_trailers(client):
    stream = client.new_stream()
    trailers = client.head(stream, [("x-late", "1")], end=True)
    data = message(infer_request(3))
    client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, data) + trailers)
    assert infer_size(client.answer(stream)) == 3
    assert is_live(client)


def test_message_comes_in_many_frames(client):
    stream = client.new_stream()
    data = message(infer_request(2000))
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    body = b"".join(frame(frames.DATA, 0, stream, piece) for piece in pieces)
    client.send(client.head(stream, headers(INFER)) + body + frame(frames.DATA, frames.END_STREAM, stream))
    assert infer_size(client.answer(stream)) == 2000


def test_equal_blocks_mean_different_things_after_the_table_changed(client):
    """A cached block must not survive a change of the dynamic table."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x40" + bytes([len(name)]) + name + bytes([len(value)]) + value

    # :method POST, :scheme http, and the newest entry of the dynamic table.
    repeated = b"\x83\x86\xbe"
    body = frame(frames.DATA, frames.END_STREAM, 0, message(b""))

    def call(stream: int, block: bytes):
        client.send(
            frame(frames.HEADERS, frames.END_HEADERS, stream, block) + body[:5] + bytes([0, 0, 0, stream]) + body[9:]
        )
        return client.answer(stream)

    content_type = b"\x00\x0ccontent-type\x10application/grpc"
    ready = b"/inference.GRPCInferenceService/ServerReady"
    assert call(1, b"\x83\x86" + literal(b":path", LIVE.encode()) + content_type).messages() == [LIVE_ANSWER]
    assert call(3, repeated + content_type).messages() == [LIVE_ANSWER]
    assert call(5, repeated + content_type).messages() == [LIVE_ANSWER]
    assert call(7, b"\x83\x86" + literal(b":path", b"/nothing/here") + content_type).status == 12
    assert call(9, repeated + content_type).status == 12
    assert call(11, b"\x83\x86" + literal(b":path", ready) + content_type).status == 0
    # A table of size 0 forgets all entries: the same block now has an index that does not exist.
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 13, b"\x20\x83\x86\x44\x01/" + content_type))
    client.send(frame(frames.HEADERS, frames.END_HEADERS, 15, repeated + content_type))
    client.until_closed()
    assert client.goaway[0] == Http2ErrorCode.COMPRESSION_ERROR


def test_smaller_header_table_of_the_client_is_acknowledged(frontend):
    with frontend.client(header_table_size=0) as client:
        client.decoder.max_allowed_table_size = 0  # the decoder refuses blocks that do not follow suit
        assert is_live(client)
        assert is_live(client)


def test_unknown_frames_and_settings_are_ignored(client):
    client.send(
        frame(0xFA, 0xFF, 7, b"whatever") + frames.settings({0xABC: 1}) + frame(frames.PRIORITY, 0, 1, bytes(5))
    )
    assert is_live(client)


def test_ping_is_answered(client):
    client.ping(b"12345678")
    assert client.pongs == [b"12345678"]


def test_stream_beyond_the_limit_is_refused(client, monkeypatch):
    monkeypatch.setattr(limits, "MAX_STREAMS", 2)
    held = [client.request(INFER, infer_request(1, "hold")) for _ in range(2)]
    assert client.answer(client.request(LIVE, b"")).reset == Http2ErrorCode.REFUSED_STREAM
    client.send(frames.rst_stream(held[0], Http2ErrorCode.CANCEL))
    assert is_live(client)


BROKEN_RULES = {
    "data on stream 0": (frame(frames.DATA, 0, 0, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "data on an idle stream": (frame(frames.DATA, 0, 9, b"x"), Http2ErrorCode.PROTOCOL_ERROR),
    "headers on stream 0": (frame(frames.HEADERS, frames.END_HEADERS, 0, b"\x83"), Http2ErrorCode.PROTOCOL_ERROR),
    "headers on an even stream": (frame(frames.HEADERS, frames.END_HEADERS, 2, b"\x83"), Http2ErrorCode.PROTOCOL_ERROR),
    "padding longer than data": (frame(frames.DATA, frames.PADDED, 1, b"\x09ab"), Http2ErrorCode.PROTOCOL_ERROR),
    "padded data without padding": (frame(frames.DATA, frames.PADDED, 1), Http2ErrorCode.FRAME_SIZE_ERROR),
    "padding longer than headers": (frame(frames.HEADERS, frames.PADDED, 1, b"\x09ab"), Http2ErrorCode.PROTOCOL_ERROR),
    "padded headers without padding": (frame(frames.HEADERS, frames.PADDED, 1), Http2ErrorCode.FRAME_SIZE_ERROR),
    "frame too large": (frames.FRAME.pack((limits.RECEIVE_FRAME_SIZE + 1) << 8, 0, 1), Http2ErrorCode.FRAME_SIZE_ERROR),
    "garbage block": (
        frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff"),
        Http2ErrorCode.COMPRESSION_ERROR,
    ),
    "index 0": (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x80"), Http2ErrorCode.COMPRESSION_ERROR),
    "table too large": (
        frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x3f\xff\xff\x03"),
        Http2ErrorCode.COMPRESSION_ERROR,
    ),
    "continuation of nothing": (frame(frames.CONTINUATION, 0, 1, b"\x83"), Http2ErrorCode.PROTOCOL_ERROR),
    "interrupted block": (
        frame(frames.HEADERS, 0, 1, b"\x83") + frame(frames.PING, 0, 0, bytes(8)),
        Http2ErrorCode.PROTOCOL_ERROR,
    ),
    "block interrupted by data": (
        frame(frames.HEADERS, 0, 1, b"\x83") + frame(frames.DATA, 0, 1, b"x"),
        Http2ErrorCode.PROTOCOL_ERROR,
    ),
    "push promise": (frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
    "priority of the connection": (frame(frames.PRIORITY, 0, 0, bytes(5)), Http2ErrorCode.PROTOCOL_ERROR),
    "priority of the wrong size": (frame(frames.PRIORITY, 0, 1, bytes(4)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "reset of an idle stream": (frames.rst_stream(1, Http2ErrorCode.CANCEL), Http2ErrorCode.PROTOCOL_ERROR),
    "reset of the wrong size": (frame(frames.RST_STREAM, 0, 1, bytes(3)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "settings of a stream": (frame(frames.SETTINGS, 0, 1), Http2ErrorCode.PROTOCOL_ERROR),
    "settings of the wrong size": (frame(frames.SETTINGS, 0, 0, bytes(5)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "settings ack with settings": (frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "initial window too large": (
        frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}),
        Http2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "frame size too small": (frames.settings({frames.MAX_FRAME_SIZE: 16383}), Http2ErrorCode.PROTOCOL_ERROR),
    "frame size too large": (frames.settings({frames.MAX_FRAME_SIZE: 1 << 24}), Http2ErrorCode.PROTOCOL_ERROR),
    "push neither on nor off": (frames.settings({frames.ENABLE_PUSH: 2}), Http2ErrorCode.PROTOCOL_ERROR),
    "ping of a stream": (frame(frames.PING, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "ping of the wrong size": (frame(frames.PING, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "goaway of a stream": (frame(frames.GOAWAY, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
    "goaway of the wrong size": (frame(frames.GOAWAY, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "window update of the wrong size": (frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), Http2ErrorCode.FRAME_SIZE_ERROR),
    "window update by nothing": (frames.window_update(0, 0), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "window overflow": (frames.window_update(0, frames.MAX_WINDOW), Http2ErrorCode.FLOW_CONTROL_ERROR),
    "window update of an idle stream": (frames.window_update(5, 1), Http2ErrorCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize(("data", "code"), BROKEN_RULES.values(), ids=BROKEN_RULES.keys())
def test_broken_rule_ends_the_connection(client, data, code):
    client.send(data)
    client.until_closed()
    assert client.goaway[0] == code


def test_stream_that_was_used_cannot_be_opened_again(client):
    assert is_live(client)
    client.send(client.head(1, headers()))
    client.until_closed()
    assert client.goaway[0] == Http2ErrorCode.PROTOCOL_ERROR


MALFORMED_HEADS = {
    "no path": [header for header in headers() if header[0] != ":path"],
    "no method": [header for header in headers() if header[0] != ":method"],
    "no scheme": [header for header in headers() if header[0] != ":scheme"],
    "twice a path": [(":path", LIVE), *headers()],
    "unknown pseudo-field": [(":status", "200"), *headers()],
    "pseudo-field behind": [*headers(), (":authority", "x")],
    "upper case": headers(LIVE, ("X-Upper", "1")),
    "space in a name": headers(LIVE, ("x y", "1")),
    "empty name": headers(LIVE, ("", "1")),
    "line break in a value": headers(LIVE, ("x", "a\r\nb")),
    "connection": headers(LIVE, ("connection", "close")),
    "te": headers(LIVE, ("te", "gzip")),
    "binary metadata that is none": headers(LIVE, ("x-bin", "***")),
}


@pytest.mark.parametrize("fields", MALFORMED_HEADS.values(), ids=MALFORMED_HEADS.keys())
def test_malformed_head_resets_the_stream_only(client, fields):
    stream = client.new_stream()
    client.send(client.head(stream, fields) + frame(frames.DATA, frames.END_STREAM, stream, message(b"")))
    assert client.answer(stream).reset == Http2ErrorCode.PROTOCOL_ERROR
    assert is_live(client)


def test_data_after_the_end_resets_the_stream(client):
    stream = client.request(INFER, infer_request(1, "hold"))
    client.send(frame(frames.DATA, 0, stream, b"more"))
    assert client.answer(stream).reset == Http2ErrorCode.STREAM_CLOSED
    assert is_live(client)


def test_headers_after_the_end_reset_the_stream(client):
    stream = client.request(INFER, infer_request(1, "hold"))
    client.send(client.head(stream, [("x", "y")], end=True))
    assert client.answer(stream).reset == Http2ErrorCode.STREAM_CLOSED
    assert is_live(client)


def test_trailers_that_end_nothing_reset_the_stream(client):
    stream = client.new_stream()
    client.send(client.head(stream, headers()) + client.head(stream, [("x", "y")]))
    assert client.answer(stream).reset == Http2ErrorCode.PROTOCOL_ERROR


def test_late_frames_of_a_refused_request_are_no_fault(client):
    """The response is sent before the client has sent its whole request, which it may continue to send."""
    stream = client.new_stream()
    client.send(client.head(stream, headers("/no/method")))
    answer = client.answer(stream)
    assert answer.status == 12
    client.send(frame(frames.DATA, 0, stream, b"late") + frames.window_update(stream, 5))
    client.send(client.head(stream, [("x-late", "1")], end=True))
    assert is_live(client)
    assert answer.reset == Http2ErrorCode.NO_ERROR
