"""Turns model exceptions into log messages with the full traceback and its file and line.

Runs in workers, in any environment (standard library only).
"""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any

#: Prefixes of modules that call or import a model; their frames are removed from the top of tracebacks.
_CALLERS = ("conch.", "importlib.", "threading", "asyncio.", "concurrent.")


def log_frame(error: BaseException, heading: str = "") -> dict[str, Any]:
    """Return the ``log`` frame of an exception: ``heading``, then the traceback from the model's first frame on."""
    trace = _frames_of_model(error.__traceback__)
    if trace is None and not isinstance(error, SyntaxError):  # a SyntaxError shows the line of the file itself
        trace = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    file, line = _location(error, trace)
    message = f"{heading}\n{text}" if heading else text
    return {"op": "log", "level": "ERROR", "file": file, "line": line, "message": message}


def of_model(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames that called the model; the whole traceback if no others exist."""
    return _frames_of_model(trace) or trace


def _frames_of_model(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
        trace = trace.tb_next
    return trace


def _location(error: BaseException, trace: TracebackType | None) -> Any:
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return os.path.basename(error.filename), error.lineno or 0
    if trace is None:
        return os.path.basename(__file__), 0
    return os.path.basename(trace.tb_frame.f_code.co_filename), trace.tb_lineno
