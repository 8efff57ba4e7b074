"""The fields of large messages, read where they are."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from conch.wire.grpc import fields
from conch.wire.grpc.fields import split_message


def request(*raw: bytes) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="model", model_version="1", id="x" * 200)
    message.parameters["a"].int64_param = -1
    message.inputs.add(name="INPUT", datatype="FP32", shape=[1, 2**40])
    message.outputs.add(name="OUTPUT")
    message.raw_input_contents.extend(raw)
    return message


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_raw_contents_are_taken_out_and_the_rest_is_left(raw):
    message = request(*raw)
    rest, contents = split_message(message.SerializeToString())
    assert list(map(bytes, contents)) == raw
    del message.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == message


def test_contents_are_not_copied():
    data = bytearray(request(b"aaaa", b"bbbb").SerializeToString())
    _, contents = split_message(data)
    data[data.index(b"bbbb")] = ord("c")
    assert bytes(contents[1]) == b"cbbb"


def test_contents_anywhere_in_a_message_are_found():
    """The fields of a message may be in any order."""
    whole = request(b"first").SerializeToString() + request(b"second").SerializeToString()
    rest, contents = split_message(whole)
    assert list(map(bytes, contents)) == [b"first", b"second"]
    expected = pb.ModelInferRequest.FromString(whole)
    del expected.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == expected


@given(st.binary(max_size=60))
def test_what_is_split_is_what_the_library_reads(data):
    """Whatever the library reads is read alike; whatever is not a message is refused by one of the two."""
    try:
        rest, contents = split_message(data)
        mine = pb.ModelInferRequest.FromString(rest)
        mine.raw_input_contents.extend(map(bytes, contents))
    except (ValueError, DecodeError):
        mine = None
    try:
        theirs = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        theirs = None
    if mine is not None:
        assert theirs is not None
        assert mine.raw_input_contents == theirs.raw_input_contents
        assert mine.model_name == theirs.model_name


@pytest.mark.parametrize("data", [b"\x3a\x05ab", b"\x3a", b"\x3a" + b"\xff" * 11, b"\x3b", b"\x09abc", b"\x80" * 20])
def test_broken_message_is_refused(data):
    with pytest.raises(ValueError):
        split_message(data)


def test_message_of_too_many_fields_is_left_to_others(monkeypatch):
    monkeypatch.setattr(fields, "MAX_FIELDS", 10)
    assert split_message(b"\x3a\x00" * 9) == (b"", [b""] * 9)
    assert split_message(b"\x3a\x00" * 10) is None
