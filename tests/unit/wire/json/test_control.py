"""Bodies of everything but inference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.machine.logs import LogSettings
from conch.wire.control import LoadParameters
from conch.wire.grpc.control import log_settings
from conch.wire.json.control import (
    error_body,
    read_index,
    read_load,
    read_log_settings,
    read_trace_setting,
    read_unload,
)


def refusal(read: Any, body: bytes) -> tuple[Code, str]:
    with pytest.raises(ConchError) as caught:
        read(body)
    return caught.value.code, caught.value.message


def test_error_has_one_member_and_any_text() -> None:
    assert error_body('no "m"\n') == b'{"error":"no \\"m\\"\\n"}'
    assert error_body("\udcff") == b'{"error":"\xff"}'


@pytest.mark.parametrize(
    ("body", "ready"), [(b"", False), (b"{}", False), (b"[]", False), (b'{"ready":true}', True), (b'{"x":1}', False)]
)
def test_index_may_ask_for_ready_models(body: bytes, ready: bool) -> None:
    assert read_index(body) is ready


def test_index_refuses_what_is_not_a_boolean() -> None:
    message = "Invalid value for 'ready': expected a boolean"
    for body in (b'{"ready":1}', b'{"ready":null}'):
        assert refusal(read_index, body) == (Code.INVALID_ARG, message)


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b'{"parameters":{}}', b'{"foo":1}'])
def test_plain_load_has_no_parameters(body: bytes) -> None:
    assert read_load(body) == LoadParameters()


def test_load_brings_configuration_and_files() -> None:
    body = b'{"parameters":{"config":"{}","file:1/model.py":"YWJj","file:labels.txt":""}}'
    assert read_load(body) == LoadParameters("{}", {"1/model.py": b"abc", "labels.txt": b""})


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b'{"parameters":5}', Code.INTERNAL, "attempt to get members for non-object"),
        (b'{"parameters":{"config":5}}', Code.INTERNAL, "attempt to access JSON non-string as string"),
        (b'{"parameters":{"foo":"x","config":5}}', Code.INTERNAL, "unexpected error on creating Triton parameter"),
        (b'{"parameters":{"file":"YWJj"}}', Code.INTERNAL, "unexpected error on creating Triton parameter"),
        (
            b'{"parameters":{"file:a":"YWJ"}}',
            Code.INVALID_ARG,
            "load parameter 'file:a' is not valid base64: Incorrect padding",
        ),
    ],
)
def test_bad_load_is_refused(body: bytes, code: Code, message: str) -> None:
    assert refusal(read_load, body) == (code, message)


def test_base64_with_other_characters_is_refused() -> None:
    for value in ("!!!", "YW Jj", "é"):
        code, message = refusal(read_load, json.dumps({"parameters": {"file:a": value}}).encode())
        assert code is Code.INVALID_ARG and message.startswith("load parameter 'file:a' is not valid base64")


@pytest.mark.parametrize(
    ("body", "dependents"), [(b"", False), (b"{}", False), (b'{"parameters":{"unload_dependents":true}}', True)]
)
def test_unload_may_take_dependents_along(body: bytes, dependents: bool) -> None:
    assert read_unload(body) == (dependents, "")


def test_unload_refuses_what_is_not_a_boolean() -> None:
    message = "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"
    assert refusal(read_unload, b'{"parameters":{"unload_dependents":1}}') == (Code.INTERNAL, message)


def test_log_settings_are_read_without_null_and_unknown_ones() -> None:
    body = b'{"log_info":false,"log_error":null,"log_verbose_level":2,"log_format":"ISO8601","log_file":null,"foo":1}'
    assert read_log_settings(body) == {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert read_log_settings(b"[]") == {}


@pytest.mark.parametrize(("sent", "level"), [(2**31 - 1, 2**31 - 1), (2**31, 0), (2**40 + 1, 1), (2**64 - 1, 0)])
def test_verbose_level_is_converted_to_int32_as_in_triton(sent: int, level: int) -> None:
    settings = read_log_settings(b'{"log_verbose_level":%d}' % sent)
    assert settings == {"log_verbose_level": level}
    assert log_settings(LogSettings(**settings)).settings["log_verbose_level"].uint32_param == level  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"", Code.INTERNAL, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b'{"log_info":1}', Code.INTERNAL, "attempt to access JSON non-boolean as boolean"),
        (
            b'{"log_verbose_level":-1}',
            Code.INTERNAL,
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (b'{"log_format":5}', Code.INTERNAL, "attempt to access JSON non-string as string"),
        (b'{"log_format":"x"}', Code.UNAVAILABLE, "invalid argument for --log_format, got: x"),
        (
            b'{"log_file":"x"}',
            Code.UNSUPPORTED,
            "log file location can not be updated through network protocol",
        ),
    ],
)
def test_bad_log_settings_are_refused(body: bytes, code: Code, message: str) -> None:
    assert refusal(read_log_settings, body) == (code, message)


@pytest.mark.parametrize("digits", ["4294967296", "1" * 5000])
def test_number_of_a_trace_setting_that_is_out_of_range_is_refused(digits: str) -> None:
    code, message = refusal(read_trace_setting, b'{"trace_rate":"%b"}' % digits.encode())
    assert code is Code.INVALID_ARG
    assert message == f"Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: {digits}"
