"""Sends a model's ``logging`` messages, ``warnings`` and uncaught thread exceptions to the server log.

Messages keep their level, file and line. If a model configures ``logging`` itself, its handlers write to standard error
instead, which the server logs line by line. Runs in workers, in any environment.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from typing import Any, TextIO

from conch.workers.child.channel import Channel
from conch.workers.child.tracebacks import log_frame


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
