"""The pure parts of the front end: header blocks, message framing, limits, the table of statuses."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import Code, ConchError
from conch.frontends.grpc import messages
from conch.frontends.grpc.messages import MessageReader, decompress, encode
from conch.frontends.grpc.requests import parse_timeout
from conch.frontends.grpc.status import STATUS, Status, encode_message
from conch.http2 import ConnectionFault, HeaderDecoder, Http2ErrorCode, encode_headers
from conch.http2.limits import FloodGuard, RateLimiter

# Header blocks


class Counting:
    """A decoder that says how often it had to parse."""

    def __init__(self) -> None:
        self.parsed = 0
        self.decoder = HeaderDecoder(self._parse)

    def _parse(self, fields):
        self.parsed += 1
        return tuple(fields)


def test_indexed_block_is_decoded_once():
    counting = Counting()
    encoder = hpack.Encoder()
    fields = [(b"x-name", b"value"), (b":method", b"POST")]
    first, again = encoder.encode(fields), encoder.encode(fields)
    heads = [counting.decoder.head(block) for block in (first, again, again, again)]
    assert heads == [((b"x-name", b"value"), (b":method", b"POST"))] * 4
    assert counting.parsed == 2


@pytest.mark.parametrize("change", [b"\x40\x01a\x01b", b"\x20", b"\x3f\x02"])
def test_change_of_the_table_forgets_cached_blocks(change):
    counting = Counting()
    for block in (b"\x83", b"\x83", change + b"\x83", b"\x83"):
        counting.decoder.head(block)
    assert counting.parsed == 3


def test_trailers_may_change_the_table_too():
    counting = Counting()
    counting.decoder.head(b"\x83")
    counting.decoder.fields(b"\x40\x01a\x01b")
    counting.decoder.head(b"\x83")
    assert counting.parsed == 2


@pytest.mark.parametrize(
    "block", [b"\x80", b"\xbe", b"\xff", b"\x40", b"\x40\x7f", b"\x83\x20", b"\x3f\xff\xff\x7f", b"\x44\x82\xff\xff"]
)
def test_undecodable_block_is_a_fault_of_the_connection(block):
    with pytest.raises(ConnectionFault) as caught:
        HeaderDecoder(tuple).head(block)
    assert caught.value.code is Http2ErrorCode.COMPRESSION_ERROR


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=300)), max_size=5))
def test_encoded_headers_are_what_a_decoder_reads(fields):
    block = encode_headers([(b":status", b"200"), *fields])
    assert [tuple(field) for field in hpack.Decoder().decode(block, raw=True)] == [(b":status", b"200"), *fields]


# Messages


@given(st.lists(st.binary(max_size=3000), max_size=6), st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_messages_are_read_whatever_the_pieces(sent, sizes):
    data = b"".join(b"".join(encode([one])[0]) for one in sent)
    reader = MessageReader("identity")
    received = []
    at = 0
    for number, size in enumerate(sizes * (len(data) // sum(sizes) + 1)):
        chunk = data[at : at + size]
        at += size
        reader.feed(memoryview(chunk) if number % 2 else chunk)
        while (message := reader.next()) is not None:
            received.append(message)
    assert received == sent
    assert reader.held == reader.missing == 0


@given(st.binary(max_size=3000), st.sampled_from(["gzip", "deflate"]))
def test_compressed_messages_are_read_back(data, encoding):
    reader = MessageReader(encoding)
    parts, size = encode([data[:100], data[100:]], encoding)
    assert sum(map(len, parts)) == size <= len(data) + 5
    reader.feed(b"".join(parts))
    received = reader.next()
    assert (decompress(received, encoding, 1 << 20) if reader.compressed else received) == data


def test_reader_knows_what_is_missing():
    reader = MessageReader("identity")
    reader.feed(b"\0\0\0\0\x0aabc")
    assert reader.next() is None
    assert (reader.held, reader.missing) == (3, 7)


def test_response_that_no_message_can_hold_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_SIZE", 3)
    with pytest.raises(ConchError) as caught:
        encode([b"ab", b"cd"])
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == "Response has byte size 4 which exceeds gRPC's byte size limit 3."


# Statuses


def test_every_error_code_has_a_status():
    assert STATUS.keys() == set(Code)
    assert STATUS[Code.UNSUPPORTED] is Status.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("text", "encoded"),
    [("plain text", b"plain text"), ("100%", b"100%25"), ("ü\n", b"%C3%BC%0A"), ("\udc80", b"%3F"), ("", b"")],
)
def test_status_message_is_percent_encoded(text, encoded):
    assert encode_message(text) == encoded


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("4m", 0.004), ("5u", 5e-6), ("6n", 6e-9), ("0S", 0), (None, None),
     ("", None), ("S", None), ("1", None), ("-1S", None), ("1x", None), ("1.5S", None), ("²S", None)],
)  # fmt: skip
def test_timeout_is_read(text, seconds):
    assert parse_timeout(text) == (seconds if seconds is None else pytest.approx(seconds))


# Limits


def test_allowance_refuses_a_burst_and_recovers():
    allowance = RateLimiter("things", burst=3, rate=2)
    for _ in range(3):
        allowance.take(100.0)
    with pytest.raises(ConnectionFault, match="too many things"):
        allowance.take(100.0)
    allowance.take(101.0)


def test_window_updates_of_a_client_that_is_answered_are_no_flood() -> None:
    """Answers of 60 bytes, for each of which a gRPC client gives back two windows, 5,000 times a second."""
    guard = FloodGuard()
    for answers in range(1, 50_000):
        guard.take_overhead(2, 60 * answers, answers, now=answers / 5000)
    with pytest.raises(ConnectionFault, match="frames without use"):
        for _ in range(20_000):
            guard.take_overhead(1, 60 * answers, answers, now=10.0)


def test_window_updates_of_a_client_that_reads_much_are_no_flood() -> None:
    """One answer that is sent for long, and a frame for each 300 bytes of it."""
    guard = FloodGuard()
    for count in range(1, 50_000):
        guard.take_overhead(1, 300 * count, 0, now=0.0)
    with pytest.raises(ConnectionFault, match="frames without use"):
        for _ in range(20_000):
            guard.take_overhead(1, 300 * count, 0, now=0.0)


def test_frames_without_use_of_a_client_that_is_answered_are_no_flood() -> None:
    """Calls that are cancelled as they are answered, messages that end with a small DATA frame: a frame an answer."""
    guard = FloodGuard()
    for answers in range(1, 50_000):
        guard.take_overhead(1, 0, answers, now=answers / 5000)
    with pytest.raises(ConnectionFault, match="frames without use"):
        for _ in range(20_000):
            guard.take_overhead(1, 0, answers, now=10.0)
