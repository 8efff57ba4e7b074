"""Errors that models raise and return, and the formatting of exceptions in responses.

Part of ``triton_python_backend_utils``; runs in the worker of a Python model.
"""

from __future__ import annotations

from enum import IntEnum
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE
from types import FrameType

from conch.backends.python import arguments

#: Separates the message of an exception from its source locations in the result of ``describe``.
PLACES = "\n\nAt:\n"

_OWN = __name__.rpartition(".")[0]


class TritonModelException(Exception):
    """The exception that the functions of ``triton_python_backend_utils`` raise."""


class ErrorCode(IntEnum):
    """Triton's error codes; the names are those of ``conch.core.errors.Code``."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """The error of one response: a message for the client and a code."""

    __slots__ = ("_code", "_message")

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = arguments.text(message, "TritonError: message")
        self._code = arguments.instance(code, "TritonError: code", ErrorCode)

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code


def describe(error: BaseException) -> str:
    """Format an exception as ``<Type>: <message>`` and the stack frames of the model, innermost first.

    The frames of the event loop, to which a coroutine's frame refers since Python 3.12, are omitted.
    """
    try:
        message = str(error) or "<EMPTY MESSAGE>"
    except BaseException as second:
        message = "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
        trouble = f"\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: {describe(second)}"
    else:
        trouble = ""
    return f"{type(error).__name__}: {message}{_format_frames(error)}{trouble}"


def _format_frames(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame: FrameType | None = trace.tb_frame
    lines: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == f"{_OWN}.python_backend" or module.startswith("asyncio."):
            break
        if not module.startswith(_OWN):
            lines.append(f"  {frame.f_code.co_filename}({frame.f_lineno}): {frame.f_code.co_name}\n")
        if frame.f_code.co_flags & (CO_COROUTINE | CO_ASYNC_GENERATOR):
            break  # since Python 3.12, the event loop's frames follow
        frame = frame.f_back
    return PLACES + "".join(lines) if lines else ""
