"""``pb_utils.Logger``: a model's messages in the server's log, under the model's file and line.

Runs in the worker of a Python model; the server's log settings decide what is sent.
"""

from __future__ import annotations

import os
import sys
from enum import IntEnum

from conch.backends.python.runtime import current


class LogLevel(IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Functions to log with; there are no instances."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    def __init__(self) -> None:
        raise TypeError("Logger has no instances: call its functions")

    @staticmethod
    def log(message: str, level: IntEnum = LogLevel.INFO) -> None:
        if not isinstance(level, LogLevel):
            raise TypeError(f"Logger.log: the level must be one of Logger's, not {level!r}")
        _log(message, level)

    @staticmethod
    def log_info(message: str) -> None:
        _log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        _log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(message, LogLevel.VERBOSE)


def _log(message: str, level: LogLevel) -> None:
    if not isinstance(message, str):
        raise TypeError(f"Logger: the message must be a str, not {type(message)}")
    caller = sys._getframe(2)
    current().write_log(level.name, os.path.basename(caller.f_code.co_filename), caller.f_lineno, message)
