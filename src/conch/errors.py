"""The one error type and Triton's eight codes.

Raised and carried everywhere, in the server and in workers (standard library only, so that it
imports in any environment).  Each front end translates codes to statuses with one total table.
Source of the codes: Triton's ``TRITONSERVER_Error_Code``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

#: What follows the first sentence of a library's message: advice on calling the library, or every name that it knows.
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")

#: How alike (difflib's ratio) a name and its suggestion are.
_LIKENESS = 0.6
#: The longest name that is compared with others: the time to compare grows with the product of their lengths.
_LONGEST_NAME = 64

#: The longest message that is sent to a client; the traceback of a model is far shorter.
MOST_CHARACTERS = 16 << 10


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
    """A failure with a code and a message.

    ``str(error)`` is the message alone; ``error.status`` is ``<Code name>: <message>``, the form that log lines use.
    ``public`` replaces the message for clients of other processes, where it tells the operator more than them: a
    command that installs something, or paths of this machine.
    """

    def __init__(self, message: str, code: Code = Code.INTERNAL, *, public: str | None = None) -> None:
        super().__init__(message if message.isascii() else _text(message))
        self.code = code
        self.public = self.message if public is None else _text(public)

    @property
    def message(self) -> str:
        return str(self.args[0])

    @property
    def status(self) -> str:
        return f"{self.code.value}: {self.message}"

    @property
    def public_status(self) -> str:
        """The status with the public message, as index reasons have it."""
        return f"{self.code.value}: {self.public}"


def _text(message: str) -> str:
    """A message without the halves of characters that names of files may have, which no protocol can carry."""
    return message.encode("utf-8", "backslashreplace").decode("utf-8")


def invalid(message: str) -> ConchError:
    """The client's request or a configuration is wrong."""
    return ConchError(message, Code.INVALID_ARG)


def not_found(message: str) -> ConchError:
    """No such model, version or region."""
    return ConchError(message, Code.NOT_FOUND)


def unavailable(message: str) -> ConchError:
    """Right request, wrong moment: not loaded, queue full, timed out, stopping."""
    return ConchError(message, Code.UNAVAILABLE)


def unsupported(message: str, *, public: str | None = None) -> ConchError:
    """The protocol has it, this server or this model does not."""
    return ConchError(message, Code.UNSUPPORTED, public=public)


def internal(message: str) -> ConchError:
    """The model or the server failed."""
    return ConchError(message, Code.INTERNAL)


def cancelled(message: str = "") -> ConchError:
    """The client, or something on its behalf, gave the request up."""
    return ConchError(message, Code.CANCELLED)


def clipped(message: str) -> str:
    """A message without what exceeds ``MOST_CHARACTERS``: it may repeat what a client sent, however much that was."""
    if len(message) <= MOST_CHARACTERS:
        return message
    return f"{message[:MOST_CHARACTERS]}… ({len(message)} characters)"


def one_line(error: BaseException) -> str:
    """The first sentence of a library's message, on one line of at most 500 characters; its type when it has none."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return _SENTENCE_END.split(paragraph, 1)[0].rstrip(".")[:500] or type(error).__name__


def nearest(name: str, known: Iterable[str], likeness: float = _LIKENESS) -> str:
    """The name in ``known`` most like ``name``, ignoring case; empty if none is, or if ``name`` is too long to compare.

    ``likeness`` is the least ratio of ``difflib`` for a match.
    """
    from difflib import get_close_matches

    if len(name) > _LONGEST_NAME:
        return ""
    spelling = {other.lower(): other for other in sorted(known)}
    matches = get_close_matches(name.lower(), spelling, n=1, cutoff=likeness)
    return spelling[matches[0]] if matches else ""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", likeness: float = _LIKENESS) -> str:
    """The end of a message about an unknown ``name``: the nearest of ``known``, or ``otherwise`` if none is like it."""
    suggestion = nearest(name, known, likeness)
    return f"did you mean '{suggestion}'?" if suggestion else otherwise
