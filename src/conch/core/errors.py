"""The error type of conch, with Triton's eight error codes.

Used in the server and in workers; standard library only, so that it imports in any environment. Each front end
translates all codes to statuses with one table. Source of the codes: Triton's ``TRITONSERVER_Error_Code``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum

#: The end of the first sentence of a library's message; advice on its API or a list of all valid names may follow.
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")

#: The minimum similarity (difflib's ratio) of a name and its suggestion.
_LIKENESS = 0.6
#: The longest name (characters) that is compared; the time grows with the product of both lengths.
_LONGEST_NAME = 64

#: The longest message that is sent to a client (characters); a model's traceback is far shorter.
MOST_CHARACTERS = 16 << 10

#: The message of UNAVAILABLE for a request that a full queue refuses, as in Triton.
QUEUE_FULL = "Exceeds maximum queue size"


class Code(Enum):
    """An error code; its value is the name in Triton's logs and reasons."""

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

    ``str(error)`` is the message alone; ``error.status`` is ``<Code name>: <message>``, as in log lines. ``public``
    replaces the message for clients in other processes if the message is meant for the operator, such as an
    installation command or local paths. ``param`` is the parameter of the request that is wrong, if there is one;
    ``reason`` names the cause for programs, as the member ``code`` of OpenAI's errors.
    """

    def __init__(
        self,
        message: str,
        code: Code = Code.INTERNAL,
        *,
        public: str | None = None,
        param: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message if message.isascii() else _text(message))
        self.code = code
        self.param = param
        self.reason = reason
        self.public = self.message if public is None else _text(public)

    @property
    def message(self) -> str:
        return str(self.args[0])

    @property
    def status(self) -> str:
        return f"{self.code.value}: {self.message}"

    @property
    def public_status(self) -> str:
        """The status with the public message, as in the reasons of the repository index."""
        return f"{self.code.value}: {self.public}"

    def prefixed(self, prefix: str) -> ConchError:
        """Return a copy whose messages begin with ``prefix``."""
        return ConchError(
            prefix + self.message, self.code, public=prefix + self.public, param=self.param, reason=self.reason
        )


def _text(message: str) -> str:
    """Escape lone surrogates, which file names may contain and no protocol can carry."""
    return message.encode("utf-8", "backslashreplace").decode("utf-8")


def invalid(message: str, param: str | None = None, *, reason: str | None = None) -> ConchError:
    """Return an INVALID_ARG error: a request or a configuration is wrong."""
    return ConchError(message, Code.INVALID_ARG, param=param, reason=reason)


def not_found(message: str) -> ConchError:
    """Return a NOT_FOUND error: the model, version or region does not exist."""
    return ConchError(message, Code.NOT_FOUND)


def unavailable(message: str) -> ConchError:
    """Return an UNAVAILABLE error: a valid request cannot run now (not loaded, queue full, timed out, stopping)."""
    return ConchError(message, Code.UNAVAILABLE)


def unsupported(message: str, *, public: str | None = None, param: str | None = None) -> ConchError:
    """Return an UNSUPPORTED error: this server or this model lacks a feature of the protocol."""
    return ConchError(message, Code.UNSUPPORTED, public=public, param=param)


def internal(message: str) -> ConchError:
    """Return an INTERNAL error: the model or the server failed."""
    return ConchError(message, Code.INTERNAL)


def cancelled(message: str = "") -> ConchError:
    """Return a CANCELLED error: the request was cancelled by the client or on its behalf."""
    return ConchError(message, Code.CANCELLED)


def clipped(message: str) -> str:
    """Truncate a message to ``MOST_CHARACTERS``; it may quote client input of any length."""
    if len(message) <= MOST_CHARACTERS:
        return message
    return f"{message[:MOST_CHARACTERS]}… ({len(message)} characters)"


def one_line(error: BaseException) -> str:
    """Return the first sentence of an error's message as one line.

    Limited to 500 characters. For an error without a message, returns the name of its type.
    """
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return _SENTENCE_END.split(paragraph, 1)[0].rstrip(".")[:500] or type(error).__name__


def why_unreadable(error: BaseException) -> str:
    """Return why a file cannot be read or parsed, for a message that has its path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def error_text(error: BaseException, *, short: bool = False) -> str:
    """Return the message of a ConchError, and ``<type>: <message>`` of any other error.

    With ``short``, an error of a library or a bug has only the first sentence of its message, as one line.
    """
    if isinstance(error, ConchError):
        return error.message
    return f"{type(error).__name__}: {one_line(error) if short else error}"


def nearest(name: str, known: Iterable[str], likeness: float = _LIKENESS) -> str:
    """Return the name in ``known`` most similar to ``name``, ignoring case.

    Returns an empty string without a match or if ``name`` is too long. ``likeness`` is the minimum ratio of ``difflib``
    for a match.
    """
    from difflib import get_close_matches

    if len(name) > _LONGEST_NAME:
        return ""
    spelling = {other.lower(): other for other in sorted(known)}
    matches = get_close_matches(name.lower(), spelling, n=1, cutoff=likeness)
    return spelling[matches[0]] if matches else ""


def did_you_mean(
    name: str,
    known: Iterable[str],
    otherwise: str = "",
    likeness: float = _LIKENESS,
    shown: Callable[[str], str] = str,
) -> str:
    """Return a suggestion of the nearest of ``known`` for the unknown ``name``; ``otherwise`` without a match.

    ``shown`` returns the text to suggest for a name, such as a path or the equivalent of another program's name.
    """
    suggestion = nearest(name, known, likeness)
    return f"did you mean '{shown(suggestion)}'?" if suggestion else otherwise
