"""Errors of requests: what a client gets, and what the log tells."""

from __future__ import annotations

import pytest

from conch.backends.base.arrays import failure
from conch.core.errors import Code, invalid


def test_an_unexpected_error_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        max([])
    except ValueError as error:
        converted = failure(error)
    assert converted.code is Code.INTERNAL and converted.message.startswith("ValueError: max()")
    assert "max([])" in caplog.text and "ValueError: max()" in caplog.text


def test_an_error_with_a_code_is_kept_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = invalid("no such label")
    assert failure(error) is error and not caplog.text
