"""Parses the body of a trace setting change."""

from __future__ import annotations

from typing import Any

from conch.core.tensors import Buffer
from conch.wire.json import text
from conch.wire.trace_values import NUMBERS, field, read_levels, read_number, refuse_file


def read_trace_setting(body: Buffer) -> dict[str, Any]:
    """Return the fields to change, None for cleared ones; raises INTERNAL, INVALID_ARG or UNSUPPORTED."""
    document = text.loads(body)
    if type(document) is not dict:
        return {}
    changes: dict[str, Any] = {}
    if document.get("trace_file") is not None:
        refuse_file()
    if "trace_level" in document:
        levels = document["trace_level"]
        changes["level"] = None if levels is None else read_levels(map(text.as_string, text.as_array(levels)))
    for setting in NUMBERS:
        if setting in document:
            value = document[setting]
            changes[field(setting)] = None if value is None else read_number(setting, text.as_string(value))
    return changes
