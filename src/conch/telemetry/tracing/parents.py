"""The caller of a traced request, from the W3C Trace Context headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


class Caller(NamedTuple):
    """The caller's trace and span, and its ``tracestate``."""

    trace_id: int
    span_id: int
    state: str


def caller_of(headers: Mapping[str, str]) -> Caller | None:
    """Return the caller from ``traceparent`` and ``tracestate``; None if the headers are missing or invalid."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if match is None:
        return None
    trace_id, span_id = int(match[1], 16), int(match[2], 16)
    if not (trace_id and span_id):
        return None
    return Caller(trace_id, span_id, headers.get("tracestate", ""))
