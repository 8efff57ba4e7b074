"""The HTTP/2 connection, seen by a client that follows or breaks every rule by hand."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2 as pb

from conch.frontends.grpc.http2 import frames, limits
from conch.frontends.grpc.http2.frames import Http2ErrorCode, frame
from tests.unit.frontends.grpc.fake_core import FakeModel, echo, hold
from tests.unit.frontends.grpc.harness import Frontend
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, RawClient, headers, message

LIVE_ANSWER = pb.ServerLiveResponse(live=True).SerializeToString()


@pytest.fixture(scope="module")
def frontend():
    with Frontend(FakeModel("echo", echo), FakeModel("hold", hold)) as frontend:
        yield frontend


@pytest.fixture
def client(frontend):
    with frontend.client() as client:
        yield client


def infer_request(size: int, model: str = "echo") -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(size.to_bytes(4, "little") + b"x" * size)
    return request.SerializeToString()


def infer_size(answer) -> int:
    (body,) = answer.messages()
    (output,) = pb.ModelInferResponse.FromString(body).raw_output_contents
    return len(output) - 4


def is_live(client: RawClient) -> bool:
    answer = client.answer(client.request(LIVE, b""))
    return answer.messages() == [LIVE_ANSWER] and answer.status == 0


# Frames and streams


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
    "no path": [one for one in headers() if one[0] != ":path"],
    "no method": [one for one in headers() if one[0] != ":method"],
    "no scheme": [one for one in headers() if one[0] != ":scheme"],
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
    """The answer goes out before the client has sent everything, which it may go on doing."""
    stream = client.new_stream()
    client.send(client.head(stream, headers("/no/method")))
    answer = client.answer(stream)
    assert answer.status == 12
    client.send(frame(frames.DATA, 0, stream, b"late") + frames.window_update(stream, 5))
    client.send(client.head(stream, [("x-late", "1")], end=True))
    assert is_live(client)
    assert answer.reset == Http2ErrorCode.NO_ERROR


# Flow control


def test_window_of_one_byte_is_respected_and_still_delivers(frontend):
    with frontend.client(initial_window_size=1) as client:
        stream = client.request(LIVE, b"")
        while (answer := client.answers.get(stream)) is None or not answer.ended:
            assert client.receive()
            if answer is not None and answer.data and not answer.ended:
                client.send(frames.window_update(stream, 1))
        assert answer.messages() == [LIVE_ANSWER]
        assert set(answer.sizes) == {1}


@pytest.mark.parametrize("rest", [1, 1000, 100_000, 130_000, 200_000, 1_000_000])
def test_client_that_used_up_its_window_may_send_the_rest_of_its_message(frontend, rest):
    with frontend.client(initial_window_size=1 << 22) as client:
        client.send(frames.window_update(0, 1 << 22))
        stream = client.new_stream()
        data = message(infer_request(limits.STREAM_WINDOW + rest))
        client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, data[: limits.STREAM_WINDOW]))
        while not any(updated == stream for updated, _ in client.window_updates):
            assert client.receive()
        assert sum(size for updated, size in client.window_updates if updated == stream) >= rest
        client.send(frame(frames.DATA, frames.END_STREAM, stream, data[limits.STREAM_WINDOW :]))
        assert infer_size(client.answer(stream)) == limits.STREAM_WINDOW + rest


def test_larger_initial_window_resumes_open_streams(frontend):
    with frontend.client(initial_window_size=0) as client:
        stream = client.request(INFER, infer_request(100))
        client.ping()
        assert client.answers[stream].data == b""
        client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 50}))
        client.ping(b"second  ")
        assert len(client.answers[stream].data) == 50
        # Negative now: 40 more are owed before anything is sent again.
        client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}) + frames.window_update(stream, 40))
        client.ping(b"third   ")
        assert len(client.answers[stream].data) == 50
        client.send(frames.window_update(stream, 1000))
        assert infer_size(client.answer(stream)) == 100


def test_streams_take_turns_when_the_connection_window_is_short(frontend):
    with frontend.client(initial_window_size=1 << 20) as client:
        streams = [client.request(INFER, infer_request(200_000)) for _ in range(2)]
        client.ping()
        received = [len(client.answers[stream].data) for stream in streams]
        assert sum(received) == frames.DEFAULT_WINDOW
        client.send(frames.window_update(0, 100_000))
        client.ping(b"second  ")
        received = [len(client.answers[stream].data) for stream in streams]
        assert sum(received) == frames.DEFAULT_WINDOW + 100_000
        assert min(received) > 0
        client.send(frames.window_update(0, 1 << 20))
        assert [infer_size(client.answer(stream)) for stream in streams] == [200_000, 200_000]
        assert max(client.answers[streams[0]].sizes) <= frames.DEFAULT_FRAME_SIZE


def test_frames_are_as_large_as_the_client_takes(frontend):
    with frontend.client(initial_window_size=1 << 20, max_frame_size=100_000) as client:
        client.send(frames.window_update(0, 1 << 20))
        assert max(client.answer(client.request(INFER, infer_request(150_000))).sizes) == 100_000


def test_client_that_exceeds_its_window_loses_the_stream(client):
    stream = client.new_stream()
    client.send(client.head(stream, headers(INFER)))
    size = limits.STREAM_WINDOW + 1
    client.send(frame(frames.DATA, 0, stream, message(bytes(size))[:size]))
    assert client.answer(stream).reset == Http2ErrorCode.FLOW_CONTROL_ERROR
    assert is_live(client)


def test_window_grows_by_what_a_large_message_needs(client):
    stream = client.new_stream()
    data = message(infer_request(3_000_000))
    client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, data[:1000]))
    client.ping()
    increments = [increment for target, increment in client.window_updates if target == stream]
    assert increments == [len(data)]
    client.send(frames.window_update(0, 1 << 22) + frames.window_update(stream, 1 << 22))
    for at in range(1000, len(data), 500_000):
        last = at + 500_000 >= len(data)
        client.send(frame(frames.DATA, frames.END_STREAM if last else 0, stream, data[at : at + 500_000]))
    assert infer_size(client.answer(stream)) == 3_000_000


def test_large_messages_wait_for_room_in_the_budget(frontend):
    budget = frontend.budget
    with frontend.client(initial_window_size=1 << 20) as client:
        client.send(frames.window_update(0, 1 << 22))
        data = message(infer_request(800_000))
        stream = client.new_stream()
        frontend.call(budget.take, budget.size)
        client.send(client.head(stream, headers(INFER)) + frame(frames.DATA, 0, stream, data[:100_000]))
        client.ping()
        assert [target for target, _ in client.window_updates if target] == []
        frontend.call(budget.release, budget.size)
        while not any(target for target, _ in client.window_updates):
            assert client.receive()
        client.send(frame(frames.DATA, 0, stream, data[100_000:300_000]))
        client.ping(b"second  ")
        client.send(frame(frames.DATA, frames.END_STREAM, stream, data[300_000:]))
        assert infer_size(client.answer(stream)) == 800_000
        client.ping(b"third   ")
        assert budget.used == 0


def test_calls_are_refused_while_far_too_much_is_held(frontend):
    budget = frontend.budget
    with frontend.client(initial_window_size=1 << 20) as client:
        frontend.call(budget.take, 2 * budget.size)
        try:
            answer = client.answer(client.request(INFER, infer_request(2000)))
            assert answer.status == 8
            assert "--max-bytes-in-flight" in answer.headers["grpc-message"]
            # Whether the server lives can be asked.
            assert is_live(client)
        finally:
            frontend.call(budget.release, 2 * budget.size)
        assert infer_size(client.answer(client.request(INFER, infer_request(2000)))) == 2000
        assert budget.used == 0


def test_unread_answers_are_counted(frontend):
    with frontend.client(initial_window_size=1000) as client:
        client.send(frames.window_update(0, 1 << 22))
        stream = client.request(INFER, infer_request(200_000))
        client.ping()
        assert frontend.budget.used > 198_000
        client.send(frames.window_update(stream, 1 << 20))
        assert infer_size(client.answer(stream)) == 200_000
        client.request(INFER, infer_request(200_000))
        client.ping(b"second  ")
        assert frontend.budget.used > 198_000
    frontend.until(lambda: not frontend.budget.used)


def test_connection_window_is_given_back(client):
    """Half of the connection's window is used up before it is renewed, whatever becomes of the data."""
    stream = client.new_stream()
    client.send(client.head(stream, headers("/no/method")))
    client.answer(stream)
    chunk = frame(frames.DATA, 0, stream, bytes(1 << 20))
    for _ in range(520):
        client.send(chunk)
    client.ping()
    assert [target for target, _ in client.window_updates].count(0) == 2


# Floods


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
    client.send(frame(frames.SETTINGS, 0, 0, b"".join([frames.SETTING.pack(*one) for one in sizes])))
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
