"""Errors of libraries on one line."""

from __future__ import annotations

from conch.convert.libraries import MAX_ERROR_CHARACTERS, describe_error
from conch.core.errors import invalid


def test_an_error_is_its_first_line_with_its_type() -> None:
    assert describe_error(ValueError("\x1b[31mno such operator\x1b[0m\n\nat node 7")) == "ValueError: no such operator"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(invalid("the texts are missing")) == "the texts are missing"


def test_the_cause_is_described_and_shortened() -> None:
    error = RuntimeError("the export failed")
    error.__cause__ = TypeError("x" * 300)
    assert describe_error(error) == f"TypeError: {'x' * (MAX_ERROR_CHARACTERS - 12)}…"


def test_errors_of_openvino_do_not_begin_with_places_in_its_source() -> None:
    error = RuntimeError(
        "Exception from src/inference/src/cpp/core.cpp:84:\nCheck 'false' failed at src/frontends/report.cpp:151:\n"
        "Model wasn't fully converted.\n-- AveragePool-18 with a message:\nKernel has size 64\n"
    )
    expected = "OpenVINO: Model wasn't fully converted. -- AveragePool-18 with a message: Kernel has size 64"
    assert describe_error(error) == expected
