"""The one error type and Triton's eight codes.

Raised and carried everywhere, in the server and in workers (standard library only, so that it
imports in any environment).  Each front end translates codes to statuses with one total table.
Source of the codes: Triton's ``TRITONSERVER_Error_Code``.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """An error code; the value is the name that Triton prints in logs and reasons."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "<invalid code>"


class ConchError(Exception):
    """A failure with a code and a message meant for the client.

    ``str(error)`` is the message alone; ``error.status`` is ``<Code name>: <message>``, the form
    that index reasons and log lines use.
    """

    def __init__(self, message: str, code: Code = Code.INTERNAL) -> None:
        super().__init__(message)
        self.code = code

    @property
    def message(self) -> str:
        return str(self.args[0])

    @property
    def status(self) -> str:
        return f"{self.code.value}: {self.message}"


def invalid(message: str) -> ConchError:
    """The client's request or a configuration is wrong."""
    return ConchError(message, Code.INVALID_ARG)


def not_found(message: str) -> ConchError:
    """No such model, version or region."""
    return ConchError(message, Code.NOT_FOUND)


def unavailable(message: str) -> ConchError:
    """Right request, wrong moment: not loaded, queue full, timed out, stopping."""
    return ConchError(message, Code.UNAVAILABLE)


def unsupported(message: str) -> ConchError:
    """The protocol has it, this server or this model does not."""
    return ConchError(message, Code.UNSUPPORTED)


def internal(message: str) -> ConchError:
    """The model or the server failed."""
    return ConchError(message, Code.INTERNAL)


def cancelled(message: str = "") -> ConchError:
    """The client, or something on its behalf, gave the request up."""
    return ConchError(message, Code.CANCELLED)
