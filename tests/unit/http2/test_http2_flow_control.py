"""Windows of HTTP/2, and the bytes that the server holds, seen by a client that sends frames by hand."""

from __future__ import annotations

import pytest

from conch.http2 import Http2ErrorCode, frames, limits
from conch.http2.frames import frame
from tests.unit.frontends.grpc.http2_calls import LIVE_ANSWER, infer_request, infer_size, is_live
from tests.unit.frontends.grpc.raw_client import INFER, LIVE, headers, message


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
