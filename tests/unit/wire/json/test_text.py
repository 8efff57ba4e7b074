"""JSON text: what is refused, with RapidJSON's reasons and offsets, and what is written."""

from __future__ import annotations

import math

import pytest

from conch.core.errors import Code, ConchError
from conch.wire.json import text

COMMA_OBJECT = "Missing a comma or '}' after an object member."
COMMA_ARRAY = "Missing a comma or ']' after an array element."
NAME = "Missing a name for object member."
COLON = "Missing a colon after a name of object member."
ROOT = "The document root must not be followed by other values."
ESCAPE = "Invalid escape character in string."


# Each reason and offset is what Triton 2.51 answers.
@pytest.mark.parametrize(
    ("document", "reason", "offset"),
    [
        (b"", "The document is empty.", 0),
        (b" ", "The document is empty.", 1),
        (b"{", NAME, 1),
        (b"}", "Invalid value.", 0),
        (b"{]", NAME, 1),
        (b'{"a"}', COLON, 4),
        (b'{"a" 1}', COLON, 5),
        (b'{"a":}', "Invalid value.", 5),
        (b'{"a":1', COMMA_OBJECT, 6),
        (b'{"a":1,}', NAME, 7),
        (b'{"a":1 "b":2}', COMMA_OBJECT, 7),
        (b'{"[":1 "b":2}', COMMA_OBJECT, 7),
        (b"[1", COMMA_ARRAY, 2),
        (b"[1,]", "Invalid value.", 3),
        (b'{"a":[{},1 2]}', COMMA_ARRAY, 11),
        (b'{"a":[1,2],"b":1 2}', COMMA_OBJECT, 17),
        (b'{"a":[1,2,}', "Invalid value.", 10),
        (b"nul", "Invalid value.", 3),
        (b'{"a":Infinit}', "Invalid value.", 12),
        (b"-", "Invalid value.", 1),
        (b'{"a":-}', "Invalid value.", 6),
        (b'{"a":+1}', "Invalid value.", 5),
        (b"01", ROOT, 1),
        (b"{} x", ROOT, 3),
        (b"1.", "Miss fraction part in number.", 2),
        (b'{"a":1e}', "Miss exponent in number.", 7),
        (b'{"a":1e400}', "Number too big to be stored in double.", 5),
        (b'"abc', "Missing a closing quotation mark in string.", 4),
        (b'{"a":"\\x"}', ESCAPE, 6),
        (b'{"a":"\x01"}', ESCAPE, 6),
        (b'{"a":"\\u12"}', "Incorrect hex digit after \\u escape in string.", 6),
        (b'{"a":"\\ud800"}', "The surrogate pair in string is invalid.", 6),
        (b'{"a":"\\ud800\\u0041"}', "The surrogate pair in string is invalid.", 6),
        ('{"é":1,}'.encode(), NAME, 8),
    ],
)
def test_malformed_json_is_refused_with_rapidjsons_reason(document: bytes, reason: str, offset: int) -> None:
    with pytest.raises(ConchError) as caught:
        text.loads(document)
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == f"failed to parse the request JSON buffer: {reason} at {offset}"


def test_numbers_that_are_not_finite_are_read() -> None:
    nan, most, least = text.loads(b"[NaN,Infinity,-Infinity]")
    assert math.isnan(nan)
    assert (most, least) == (math.inf, -math.inf)


def test_bytes_that_are_not_utf8_survive_reading() -> None:
    assert text.utf8(text.loads(b'"a\xffb"')) == b"a\xffb"


def test_half_a_surrogate_pair_is_kept_as_triton_keeps_it() -> None:
    assert text.utf8(text.loads(b'"\\udc00"')) == b"\xed\xb0\x80"


def test_an_escaped_backslash_before_u_is_not_a_surrogate() -> None:
    assert text.loads(b'[NaN,"\\\\ud800"]')[1] == "\\ud800"


def test_byte_order_mark_is_skipped() -> None:
    assert text.loads(b"\xef\xbb\xbf{}") == {}


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":['])
def test_deep_nesting_is_refused(opening: bytes) -> None:
    for document in (opening * 5000, opening * 101 + b"1" + b"]" * 101, opening * 1000 + b"NaN"):
        with pytest.raises(ConchError) as caught:
            text.loads(document)
        assert caught.value.code is Code.INVALID_ARG
        assert caught.value.message == "JSON nesting depth exceeds maximum allowed limit (100)"


def test_a_hundred_levels_and_many_brackets_are_accepted() -> None:
    document = b"[" * 100 + b"]" * 100
    assert text.loads(document)
    assert len(text.loads(b"[" + b",".join([b"[]"] * 1000) + b"]")) == 1000
    assert text.loads(b'["' + b"[" * 1000 + b'"]') == ["[" * 1000]
    assert text.loads(b'["\\"' + b"{" * 1000 + b'\\\\"]') == ['"' + "{" * 1000 + "\\"]


def test_a_string_of_escaped_quotes_without_end_is_read_once() -> None:
    # Trying each of its quotes as the beginning of a string would take minutes.
    with pytest.raises(ConchError, match="Missing a closing quotation mark"):
        text.loads(b"[" * 99 + b'"' + b'\\"' * 500_000 + b"[[[")


def test_an_integer_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConchError, match="Number too big"):
        text.loads(b"[NaN," + b"9" * 5000 + b"]")


def test_written_json_is_compact_and_keeps_what_json_has_no_words_for() -> None:
    document = {
        "a": text.numbers([1.5, math.nan, math.inf, -math.inf]),
        "b": text.string(b'a\xff"\n'),
        "c": text.numbers(-math.inf),
        "d": text.numbers([1, 2]),
    }
    assert text.dumps(document) == b'{"a":[1.5,NaN,Infinity,-Infinity],"b":"a\xff\\"\\n","c":-Infinity,"d":[1,2]}'


def test_a_sum_that_overflows_does_not_change_finite_numbers() -> None:
    assert text.dumps(text.numbers([1.5e308, 1.5e308])) == b"[1.5e+308, 1.5e+308]".replace(b" ", b"")


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (text.as_string, 5, "attempt to access JSON non-string as string"),
        (text.as_bool, 1, "attempt to access JSON non-boolean as boolean"),
        (text.as_unsigned, -1, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (text.as_unsigned, True, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (text.as_unsigned, 2**64, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (text.as_array, {}, "attempt to access JSON non-array as array"),
        (text.as_object, [], "attempt to access JSON non-object as object"),
        (text.as_members, None, "attempt to get members for non-object"),
    ],
)
def test_values_of_the_wrong_type_are_named(read: object, value: object, message: str) -> None:
    assert callable(read)
    for context, expected in (("", message), ("Unable to parse 'x'", f"Unable to parse 'x': {message}")):
        with pytest.raises(ConchError) as caught:
            read(value, context)
        assert (caught.value.code, caught.value.message) == (Code.INTERNAL, expected)


def test_missing_member_is_named() -> None:
    for value in ({}, [], None, "x"):
        with pytest.raises(ConchError, match=r"^attempt to access non-existing object member 'x'$"):
            text.member(value, "x")


def test_a_string_that_is_not_utf8_is_no_name() -> None:
    with pytest.raises(ConchError, match="valid UTF-8") as caught:
        text.as_string(text.loads(b'"\xff"'))
    assert caught.value.code is Code.INVALID_ARG
