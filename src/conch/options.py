"""Parses command-line texts into ``Settings``.

The command line and the library call ``parse``. Errors have tritonserver's wording, preceded by the option's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from conch.core.errors import ConchError, invalid
from conch.machine.memory import read_size
from conch.settings import OPTIONS, Option, Range, Resource, Restriction, Setting, Settings

#: Takes the flag, for messages, and the text; raises INVALID_ARG.
Parser = Callable[[str, str], Any]

#: RE2's syntax, which Triton accepts, for case sensitivity; Python supports it only in groups.
_WITH_CASE: Final = "(?-i)"
RESTRICTABLE: Final = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
    "logging",
)  # fmt: skip

#: Alternative flags: the equivalent flag, and a template of its value.
RENAMED: Final[Mapping[str, tuple[str, str]]] = {
    "model-store": ("model-repository", "{}"),
    "strict-model-config": ("disable-auto-complete-config", "{}"),
    "response-cache-byte-size": ("cache-config", "local,size={}"),
    "trace-file": ("trace-config", "triton,file={}"),
    "trace-level": ("trace-config", "level={}"),
    "trace-rate": ("trace-config", "rate={}"),
    "trace-count": ("trace-config", "count={}"),
    "trace-log-frequency": ("trace-config", "triton,log-frequency={}"),
}


def parse(texts: Mapping[str, Sequence[str]]) -> Settings:
    """Parse the texts given for each flag (without dashes); the last text of an option counts.

    Raises INVALID_ARG for an invalid value or contradictory options.
    """
    if "response-cache-byte-size" in texts and "cache-config" in texts:
        raise invalid(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both provided."
            " Please provide one or the other."
        )
    values: dict[str, list[Any]] = {}
    # Alternative flags first, so that values of the flags themselves override theirs.
    for flag in sorted(texts, key=lambda flag: flag not in RENAMED):
        target, template = RENAMED.get(flag, (flag, "{}"))
        option = OPTIONS[target]
        parser = parser_of(option)
        values.setdefault(target, []).extend(parser(flag, template.format(text)) for text in texts[flag])
    chosen: dict[str, Any] = {}
    for flag, parsed in values.items():
        option = OPTIONS[flag]
        chosen[option.name] = tuple(parsed) if option.repeatable else parsed[-1]
    return Settings(**chosen)


def platform_defaults(environment: Mapping[str, str]) -> dict[str, tuple[str]]:
    """Return the flags, with their texts, that Vertex AI sets by environment variables."""
    texts = {}
    if "AIP_HTTP_PORT" in environment:
        texts["vertex-ai-port"] = (environment["AIP_HTTP_PORT"],)
    if environment.get("AIP_MODE") == "PREDICTION":
        texts |= {"allow-vertex-ai": ("true",), "allow-http": ("false",), "allow-grpc": ("false",)}
    return texts


def bad_option(flag: str, message: str) -> ConchError:
    return invalid(f'Bad option: "--{flag}". {message}')


def parser_of(option: Option) -> Parser:
    """Return the parser of an option's text; for a repeatable option, of one of its texts."""
    if option.name in _STRUCTURED:
        return _STRUCTURED[option.name]
    kind = get_args(option.type)[0] if option.repeatable else option.type
    if get_origin(kind) is Annotated:
        return _integer(*next(part for part in get_args(kind) if isinstance(part, Range)))
    if get_origin(kind) is Literal:
        return _one_of(get_args(kind))
    return _SCALAR[kind]


def _string(flag: str, text: str) -> str:
    return text


def _boolean(flag: str, text: str) -> bool:
    match text.lower():
        case "true" | "on" | "1":
            return True
        case "false" | "off" | "0":
            return False
    raise bad_option(flag, f"invalid value for bool option: {text}")


def _integer(low: int, high: int) -> Parser:
    def parse(flag: str, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise bad_option(flag, f"Invalid option value. Got {text}") from None
        if not low <= number <= high:
            raise bad_option(flag, f"Provided option value is out of bound. Got {text}")
        return number

    return parse


def _float(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise bad_option(flag, f"Invalid option value. Got {text}") from None


def _one_of(names: Sequence[str]) -> Parser:
    def parse(flag: str, text: str) -> str:
        for name in (text, text.lower()):
            if name in names:
                return name
        raise bad_option(flag, f"invalid argument for --{flag}: '{text}' is none of {', '.join(names)}")

    return parse


def _not_empty(flag: str, text: str) -> str:
    if not text:
        raise bad_option(flag, f"Error: empty argument for --{flag}")
    return text


def header_pattern(text: str) -> re.Pattern[str]:
    """Compile the pattern of forwarded header names, which ignores case unless it begins with ``(?-i)``.

    Raises ``re.error``.
    """
    return re.compile(text.removeprefix(_WITH_CASE), 0 if text.startswith(_WITH_CASE) else re.IGNORECASE)


def _pattern(flag: str, text: str) -> str:
    try:
        header_pattern(text)
    except re.error as error:
        raise bad_option(flag, f"Not a regular expression: {error}. Got {text}") from None
    return text


def _pair(separator: str, first: Parser, second: Parser) -> Parser:
    def parse(flag: str, text: str) -> tuple[Any, Any]:
        left, present, right = text.partition(separator)
        if not present:
            raise bad_option(
                flag,
                "Cannot parse pair option due to incorrect number of inputs."
                f"--<pair option> argument requires format <first>{separator}<second>. Found: {text}",
            )
        return first(flag, left), second(flag, right)

    return parse


def _setting(scope_name: str, *, scope_needed: bool = False) -> Parser:
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


def _metrics_setting(flag: str, text: str) -> Setting:
    key, _, value = text.partition("=")
    if not (key and value) or "," in key:
        raise bad_option(flag, f"--{flag} option format is <setting>=<value>. Got {text}")
    return Setting("", key, value)


def _trace_setting(flag: str, text: str) -> Setting:
    setting: Setting = _setting("trace mode")(flag, text)
    mode = setting.value if (setting.scope, setting.key) == ("", "mode") else setting.scope
    if mode not in ("", "triton", "opentelemetry"):
        options = 'Available options are "triton" and "opentelemetry"'
        raise bad_option(flag, f"invalid value for trace mode option: {mode}. {options}")
    match setting.key:
        case "level" if setting.value.upper() not in ("OFF", "TIMESTAMPS", "TENSORS"):
            raise bad_option(f"{flag} level", f"invalid value for trace level option: {setting.value.lower()}")
        case "rate" | "log-frequency":
            _integer(0, 2**32 - 1)(f"{flag} {setting.key}", setting.value)
        case "count":
            _integer(-1, 2**31 - 1)(f"{flag} count", setting.value)
    return setting


def _restriction(kind: str) -> Parser:
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


def _resource(flag: str, text: str) -> Resource:
    name, *numbers = text.split(":")
    if len(numbers) not in (1, 2):
        form = "'<resource_name>:<count>:<device>' or '<resource_name>:<count>'"
        raise bad_option(flag, f"--{flag} option format is {form}. Got {text}")
    amount, device = [_natural(flag, number) for number in numbers] + [-1] * (2 - len(numbers))
    return Resource(name, amount, device)


def _size(flag: str, text: str) -> str:
    try:
        size = read_size(text, 100)
    except ValueError:
        raise bad_option(
            flag, f"It is a number of bytes, one with a unit as 8GiB, or a share of the memory as 80%. Got {text}"
        ) from None
    if not size:
        raise bad_option(flag, f"Nothing fits into it. Got {text}")
    return text


_natural = _integer(0, 2**63 - 1)

_SCALAR: Final[Mapping[type, Parser]] = {bool: _boolean, float: _float, str: _string}

#: Parsers of options that have their own text format, by field.
_STRUCTURED: Final[Mapping[str, Parser]] = {
    "backend_config": _setting("backend name"),
    "cache_config": _setting("cache name", scope_needed=True),
    "cuda_memory_pool_byte_size": _pair(":", _natural, _natural),
    "cuda_virtual_address_size": _pair(":", _natural, _natural),
    "grpc_header_forward_pattern": _pattern,
    "grpc_restricted_protocol": _restriction("protocol"),
    "host_policy": _setting("policy name"),
    "http_header_forward_pattern": _pattern,
    "http_restricted_api": _restriction("api"),
    "memory_budget": _size,
    "metrics_config": _metrics_setting,
    "model_config_name": _not_empty,
    "model_load_gpu_limit": _pair(":", _natural, _float),
    "rate_limit_resource": _resource,
    "sagemaker_safe_port_range": _pair("-", _natural, _natural),
    "trace_config": _trace_setting,
}
