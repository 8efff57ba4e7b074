"""Whom a request that is traced was made by: the headers of W3C's Trace Context; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


class Caller(NamedTuple):
    """The trace and the span of whoever made a request, and what else its tracing system says."""

    trace_id: int
    span_id: int
    state: str


def caller_of(headers: Mapping[str, str]) -> Caller | None:
    """The caller that ``traceparent`` and ``tracestate`` name; None where they are missing or no valid ones."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if match is None:
        return None
    trace_id, span_id = int(match[1], 16), int(match[2], 16)
    if not (trace_id and span_id):
        return None
    return Caller(trace_id, span_id, headers.get("tracestate", ""))
