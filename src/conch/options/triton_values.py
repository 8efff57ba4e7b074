"""Reads the values of the server's options in tritonserver's formats; errors have its wording.

A reader takes the flag, for messages, and the text of a value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from conch.core.errors import ConchError, invalid
from conch.machine.memory import read_size
from conch.options.declaration import Option, Reader


class Setting(NamedTuple):
    """``<scope>,<key>=<value>``: a setting of a backend, a cache or a trace mode; an empty scope means all."""

    scope: str
    key: str
    value: str


class Restriction(NamedTuple):
    """Groups of endpoints that require ``header`` to have ``value``."""

    apis: tuple[str, ...]
    header: str
    value: str


class Resource(NamedTuple):
    """The amount of a rate limiter's resource on a device; device -1 means every device."""

    name: str
    amount: int
    device: int


#: The trace level that each value means, in lower case.
_TRACE_LEVELS: Final = {
    **dict.fromkeys(("off", "false"), "OFF"),
    **dict.fromkeys(("timestamps", "true", "on", "min", "max"), "TIMESTAMPS"),
    "tensors": "TENSORS",
}
#: RE2's syntax, which Triton accepts, for case sensitivity; Python supports it only in groups.
_WITH_CASE: Final = "(?-i)"
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@A-Z\s]+")
RESTRICTABLE: Final = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
    "logging",
)  # fmt: skip


def bad_option(flag: str, message: str) -> ConchError:
    return invalid(f'Bad option: "--{flag}". {message}')


def _string(flag: str, text: str) -> str:
    return text


def _boolean(flag: str, text: str) -> bool:
    match text.lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
    raise bad_option(flag, f"invalid value for bool option: {text}")


def _integer(low: int, high: int) -> Reader:
    def parse(flag: str, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise bad_option(flag, f"Invalid option value. Got {text}") from None
        if not low <= number <= high:
            raise bad_option(flag, f"Provided option value is out of bound. Got {text}")
        return number

    return parse


_natural = _integer(0, 2**63 - 1)


def number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise bad_option(flag, f"Invalid option value. Got {text}") from None


def _number_in(low: float, high: float) -> Reader:
    def parse(flag: str, text: str) -> float:
        value = number(flag, text)
        if not low <= value <= high:
            raise bad_option(flag, f"Provided option value is out of bound. Got {text}")
        return value

    return parse


def _one_of(names: Sequence[str]) -> Reader:
    def parse(flag: str, text: str) -> str:
        for name in (text, text.lower()):
            if name in names:
                return name
        raise bad_option(flag, f"invalid argument for --{flag}: '{text}'; its values are {', '.join(names)}")

    return parse


def not_empty(flag: str, text: str) -> str:
    if not text:
        raise bad_option(flag, f"Error: empty argument for --{flag}")
    return text


def header_pattern(text: str) -> re.Pattern[str]:
    """Compile the pattern of forwarded header names, which ignores case unless it begins with ``(?-i)``.

    Raises ``re.error``.
    """
    return re.compile(text.removeprefix(_WITH_CASE), 0 if text.startswith(_WITH_CASE) else re.IGNORECASE)


def pattern(flag: str, text: str) -> str:
    try:
        header_pattern(text)
    except re.error as error:
        raise bad_option(flag, f"Not a regular expression: {error}. Got {text}") from None
    return text


def pair(separator: str, second: Reader = _natural) -> Reader:
    """Return a reader of a nonnegative integer and a second value."""

    def parse(flag: str, text: str) -> tuple[Any, Any]:
        left, present, right = text.partition(separator)
        if not present:
            raise bad_option(
                flag,
                "Cannot parse pair option due to incorrect number of inputs."
                f"--<pair option> argument requires format <first>{separator}<second>. Found: {text}",
            )
        return _natural(flag, left), second(flag, right)

    return parse


def setting(scope_name: str, *, scope_needed: bool = False) -> Reader:
    """Return a parser of ``<scope>,<key>=<value>``, or of ``<key>=<value>`` if the scope is optional."""

    def parse(flag: str, text: str) -> Setting:
        left, _, value = text.partition("=")
        scope, comma, key = left.rpartition(",")
        form = f"<{scope_name}>,<setting>=<value>"
        if not scope and (comma or scope_needed):
            raise bad_option(
                flag, f"No {scope_name.split()[0]} specified. --{flag} option format is {form}. Got {text}"
            )
        if not (key and value):
            raise bad_option(flag, f"--{flag} option format is '{form}'. Got {text}")
        return Setting(scope, key, value)

    return parse


def metrics_setting(flag: str, text: str) -> Setting:
    key, _, value = text.partition("=")
    if not (key and value) or "," in key:
        raise bad_option(flag, f"--{flag} option format is <setting>=<value>. Got {text}")
    return Setting("", key, value)


def trace_setting(flag: str, text: str) -> Setting:
    parsed: Setting = setting("trace mode")(flag, text)
    mode = parsed.value if (parsed.scope, parsed.key) == ("", "mode") else parsed.scope
    if mode not in ("", "triton", "opentelemetry"):
        options = 'Available options are "triton" and "opentelemetry"'
        raise bad_option(flag, f"invalid value for trace mode option: {mode}. {options}")
    match parsed.key:
        case "level":
            value = parsed.value.lower()
            if value not in _TRACE_LEVELS:
                raise bad_option(f"{flag} level", f"invalid value for trace level option: {value}")
            return parsed._replace(value=_TRACE_LEVELS[value])
        case "rate" | "log-frequency":
            _integer(0, 2**32 - 1)(f"{flag} {parsed.key}", parsed.value)
        case "count":
            _integer(-1, 2**31 - 1)(f"{flag} count", parsed.value)
    return parsed


def restriction(kind: str) -> Reader:
    def parse(flag: str, text: str) -> Restriction:
        names, _, rule = text.partition(":")
        header, equals, value = rule.partition("=")
        if not (names and header and equals):
            raise bad_option(flag, f"--{flag} option format is '<config name>:<setting>=<value>'. Got {text}")
        apis = tuple(names.split(","))
        for api in apis:
            if api not in RESTRICTABLE:
                raise bad_option(flag, f"unknown restricted {kind} '{api}'")
        return Restriction(apis, header, value)

    return parse


def origin(flag: str, text: str) -> str:
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise bad_option(flag, f"The value must be <scheme>://<host>[:<port>], in lower case, or *. Got {text}")
    return text


def resource(flag: str, text: str) -> Resource:
    name, *numbers = text.split(":")
    if len(numbers) not in (1, 2):
        form = "'<resource_name>:<count>:<device>' or '<resource_name>:<count>'"
        raise bad_option(flag, f"--{flag} option format is {form}. Got {text}")
    amount, device = [_natural(flag, number) for number in numbers] + [-1] * (2 - len(numbers))
    return Resource(name, amount, device)


def size(flag: str, text: str) -> str:
    try:
        size = read_size(text, 100)
    except ValueError:
        raise bad_option(
            flag, f"The value must be bytes, a size such as 8GiB, or a share of the memory such as 80%. Got {text}"
        ) from None
    if not size:
        raise bad_option(flag, f"The value must be above 0. Got {text}")
    return text


def reader_of(declared: Option) -> Reader:
    """Return the parser of an option's text by its type; for a repeatable option, of one of its texts."""
    if declared.range is not None:
        low, high, _ = declared.range
        return _number_in(low, high) if declared.kind is float else _integer(int(low), int(high))
    if declared.choices:
        return _one_of(declared.choices)
    return {bool: _boolean, float: number, str: _string}[declared.kind]
