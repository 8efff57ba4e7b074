"""Reads the JSON object of a request: members are taken and checked one at a time; the remaining ones are refused.

Runs on the event loop, or in an offloading process for large bodies. ``null`` is the same as a missing member. The
errors name the invalid member; the HTTP front end writes them as OpenAI's error object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from math import isfinite
from typing import Any, Final

import orjson

from conch.core.errors import Code, ConchError, clipped, did_you_mean, nearest
from conch.core.tensors import Buffer
from conch.wire.json import text

#: The ``type`` of errors by HTTP status; other 4xx are ``invalid_request_error``.
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
#: Model inputs whose value is the request member of the same name.
_INPUTS: Final = ("messages", "tools")


class ApiError(ConchError):
    """An OpenAI API error: ``param`` is the invalid member (``messages[0].role``), ``reason`` OpenAI's ``code``."""

    def __init__(
        self, message: str, param: str | None = None, *, code: Code = Code.INVALID_ARG, reason: str | None = None
    ) -> None:
        super().__init__(message, code, param=param, reason=reason)


def error_object(status: int, message: str, param: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object for an HTTP status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    named = None if param is None else text.error_message(param)
    return {"error": {"message": text.error_message(message), "type": kind, "param": named, "code": reason}}


def error_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response, also used as the data of an event that ends a stream."""
    param, reason = error.param, error.reason
    if error.code is Code.NOT_FOUND and not isinstance(error, ApiError):  # only models are looked up
        param, reason = "model", "model_not_found"
    elif param is None and not isinstance(error, ApiError):
        # Workers report input names; these inputs have the names of request members.
        message = error.public.removeprefix("Error generating stream: ")  # of Triton's vLLM backend
        param = next((name for name in _INPUTS if message.startswith(f"input '{name}' ")), None)
    return text.dumps(error_object(status, error.public, param, reason))


_SHOWN: Final = 60
#: Minimum similarity (``difflib``'s ratio) between an unknown member and its suggested replacement.
_LIKENESS: Final = 0.6
#: The same for a missing member and one that was not taken yet: ``text_2`` must not be called unknown for ``text_1``.
_MISSPELLED: Final = 0.85
#: Maximum number of members that are compared with a missing one: each takes up to 0.1 ms.
_MOST_COMPARED: Final = 100


def read_body(body: Buffer, change: Callable[[dict[str, Any]], None] | None = None) -> Fields:
    """Return the members of a request body, which ``change`` may change. Raises ApiError unless it is a JSON object."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None
    if text.too_deep(bytes(body)):
        raise ApiError(f"the body is nested deeper than {text.MAX_DEPTH} levels")
    if type(document) is not dict:
        raise ApiError("the body must be a JSON object")
    if change is not None:
        change(document)
    return Fields(document)


def wrong(param: str, value: Any, expected: str) -> ApiError:
    """Return the error for member ``param`` with ``value``, which must be ``expected``."""
    shown = orjson.dumps(value).decode()
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
    return ApiError(f"'{param}' is {shown}; it must be {expected}", param)


def one_of(param: str, value: Any, choices: Collection[str]) -> str:
    """Return the ``value`` of member ``param``. Raises ApiError unless it is one of ``choices``."""
    if type(value) is not str or value not in choices:
        raise wrong(param, value, f"one of {', '.join(choices)}")
    return value


class Fields:
    """The members of an object in a request; errors name the object by its ``path``.

    Methods that take a member return None if it is missing, and raise ApiError if it is invalid.
    """

    __slots__ = ("_known", "_members", "path")

    def __init__(self, members: dict[str, Any], path: str = "") -> None:
        self._members = dict(members)
        self._known: set[str] = set()
        self.path = path

    def name(self, member: str) -> str:
        """Return the path of a member."""
        return f"{self.path}.{member}" if self.path else member

    def has(self, member: str) -> bool:
        """Whether a member has a value and has not been taken."""
        return self._members.get(member) is not None

    @property
    def left(self) -> bool:
        """Whether members have not been taken."""
        return bool(self._members)

    def is_object(self, member: str) -> bool:
        """Whether a member is an object and has not been taken."""
        return type(self._members.get(member)) is dict

    def take(self, member: str) -> Any:
        """Take a member of any type."""
        self._known.add(member)
        return self._members.pop(member, None)

    def required(self, member: str) -> Any:
        """Take a member of any type, which must have a value."""
        value = self.take(member)
        if value is None:
            raise self.missing(member)
        return value

    def text(self, member: str) -> str | None:
        value = self.take(member)
        if value is not None and type(value) is not str:
            raise wrong(self.name(member), value, "a string")
        return value

    def required_text(self, member: str) -> str:
        value = self.text(member)
        if not value:
            raise ApiError(f"'{self.name(member)}' is missing", self.name(member), reason="missing_required_parameter")
        return value

    def flag(self, member: str, default: bool = False) -> bool:
        value = self.take(member)
        if value is None:
            return default
        if type(value) is not bool:
            raise wrong(self.name(member), value, "true or false")
        return value

    def integer(self, member: str, low: int, high: int) -> int | None:
        original = value = self.take(member)
        if value is None:
            return None
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise wrong(self.name(member), original, f"a whole number from {low} to {high}")
        return value

    def number(self, member: str, low: float, high: float) -> float | None:
        value = self.take(member)
        if value is None:
            return None
        if type(value) not in (int, float) or not isfinite(value) or not low <= value <= high:
            raise wrong(self.name(member), value, f"a number from {low:g} to {high:g}")
        number: float = value
        return number

    def object(self, member: str) -> Fields | None:
        value = self.take(member)
        if value is None:
            return None
        if type(value) is not dict:
            raise wrong(self.name(member), value, "an object")
        return Fields(value, self.name(member))

    def array(self, member: str) -> list[Any] | None:
        value = self.take(member)
        if value is not None and type(value) is not list:
            raise wrong(self.name(member), value, "an array")
        return value

    def strings(self, member: str) -> list[str] | None:
        """Take a string, or an array of strings, none of them empty."""
        value = self.take(member)
        listed = [value] if type(value) is str else value
        if listed is None:
            return None
        if type(listed) is not list or any(type(text) is not str or not text for text in listed):
            raise wrong(self.name(member), value, "a string or an array of strings that are not empty")
        return listed

    def refuse(self, *members: str, hint: str = "") -> None:
        """Refuse members that request an unsupported feature."""
        for member in members:
            if self.take(member) not in (None, False):
                raise ApiError(f"'{self.name(member)}' is not supported{hint}", self.name(member))

    def ignore(self, *members: str) -> None:
        """Ignore members that have no effect here."""
        for member in members:
            self.take(member)

    def missing(self, member: str) -> ApiError:
        """Return the error for a missing required member, with an unknown one that is almost the same, if any."""
        similar = nearest(member, islice(self._members, _MOST_COMPARED), _MISSPELLED)
        hint = f"; '{self.name(similar)}' is not known here" if similar else ""
        return ApiError(
            f"'{self.name(member)}' is missing{hint}", self.name(member), reason="missing_required_parameter"
        )

    def finish(self) -> None:
        """Refuse the remaining members; call this after taking all supported ones."""
        for member, value in self._members.items():
            if value is not None:
                suggestion = did_you_mean(member, self._known, likeness=_LIKENESS, shown=self.name)
                hint = f"; {suggestion}" if suggestion else ""
                name = clipped(self.name(member))
                raise ApiError(f"'{name}' is not known here{hint}", name, reason="unknown_parameter")
