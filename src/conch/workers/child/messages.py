"""Sends a model's ``logging`` messages, ``warnings`` and exceptions to the server log.

Messages keep their level, file and line; those of exceptions have the traceback from the model's first frame on. If a
model configures ``logging`` itself, its handlers write to standard error instead, which the server logs line by line.
Runs in workers, in any environment.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import warnings
from types import TracebackType
from typing import Any, TextIO

from conch.workers.child.channel import Channel

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


def send_messages(channel: Channel) -> None:
    """Install the hooks that send messages to the server; called once, before the model is loaded."""
    logging.lastResort = _ChannelHandler(channel)

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None:
            file.write(warnings.formatwarning(message, category, filename, lineno, line))
            return
        text = f"{category.__name__}: {message}"
        channel.send(_frame("WARNING", filename, lineno, text))

    def end_thread(ended: Any) -> None:
        if ended.exc_value is not None and ended.exc_type is not SystemExit:
            name = ended.thread.name if ended.thread is not None else "?"
            channel.send(log_frame(ended.exc_value, f"exception in thread '{name}'"))

    warnings.showwarning = show_warning
    threading.excepthook = end_thread


class _ChannelHandler(logging.Handler):
    """Replaces ``logging.lastResort``, which prints warnings and errors without file and line."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        level = "ERROR" if record.levelno >= logging.ERROR else "WARNING"
        try:
            self._channel.send(_frame(level, record.pathname, record.lineno, self.format(record)))
        except Exception:
            self.handleError(record)


def _frame(level: str, path: str, line: int, message: str) -> Any:
    return {"op": "log", "level": level, "file": os.path.basename(path), "line": line, "message": message}


def line_buffer_streams() -> None:
    """Make Python's standard streams and C's ``stdout`` line-buffered."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        line_buffered = 1  # _IOLBF
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, line_buffered, ctypes.c_size_t(0))
