"""The messages of trace settings.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from conch.errors import invalid
from conch.wire.trace_numbers import NUMBERS, field, read_levels, read_number, refuse_file


def read_trace_setting(request: service_pb2.TraceSettingRequest) -> dict[str, Any]:
    """The fields to change, None for those that are cleared; raises INVALID_ARG or UNSUPPORTED."""
    given = {name: list(setting.value) for name, setting in request.settings.items()}
    changes: dict[str, Any] = {}
    if given.get("trace_file"):
        refuse_file()
    if "trace_level" in given:
        changes["level"] = read_levels(given["trace_level"]) if given["trace_level"] else None
    for setting in NUMBERS:
        if setting in given:
            values = given[setting]
            if len(values) > 1:
                raise invalid(f"expect only 1 value for '{setting}'")
            changes[field(setting)] = read_number(setting, values[0]) if values else None
    return changes


def trace_setting(shown: Mapping[str, Any]) -> service_pb2.TraceSettingResponse:
    response = service_pb2.TraceSettingResponse()
    for name, value in shown.items():
        response.settings[name].value.extend(value if isinstance(value, list) else [value])
    return response
