"""The member of a request that an error object names."""

from __future__ import annotations

import json

import pytest

from conch.core.errors import ConchError, invalid, not_found
from conch.wire.openai.reading import ApiError, error_body


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (ApiError("'n' must be a whole number", "n"), "n"),
        (invalid("input 'tools' would have no effect: the chat template of the model has no place for tools"), "tools"),
        (invalid("input 'messages' must be a JSON list"), "messages"),
        (not_found("Request for unknown model: 'm' is not found"), "model"),
        (invalid("Error generating stream: input 'messages' must be a JSON list"), "messages"),
        (invalid("input 'seed' is odd"), None),
        (invalid("the input 'tools' is no member of this sentence's beginning"), None),
    ],
)
def test_error_names_the_member(error: ConchError, param: str | None) -> None:
    assert json.loads(error_body(400, error))["error"]["param"] == param


def test_error_names_its_cause() -> None:
    error = invalid("the prompt is too long", "messages", reason="context_length_exceeded").prefixed("Error: ")
    shown = json.loads(error_body(400, error))["error"]
    assert (shown["param"], shown["code"]) == ("messages", "context_length_exceeded")
