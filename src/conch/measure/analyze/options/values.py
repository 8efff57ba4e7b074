"""Readers of option values from the command line or a YAML file.

Pure. A reader takes the option's name, for messages, and the value; it raises INVALID_ARG for a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from conch.core.errors import Code, ConchError, did_you_mean, invalid
from conch.measure.analyze.judging.goals import Price
from conch.options.declaration import Reader

#: Maximum length of a list that a range expands to; a thousand loads would take days.
_LONGEST = 1000


class OptionProblem(ConchError):
    """An invalid value or key; ``path`` is its path, such as ``profile_models.add.weighting``."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message, Code.INVALID_ARG)
        self.path = path


def wrong(name: str, value: Any, expected: str) -> OptionProblem:
    """Return the error for an unexpected value."""
    return OptionProblem(f"{name}: {shown(value)} is not {expected}", name)


def shown(value: Any) -> str:
    """Format a value for a message; long values are cut."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def text(name: str, value: Any) -> str:
    """Read a non-empty string."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise wrong(name, value, "a text")


def path(name: str, value: Any) -> Path:
    """Read the path of a file or directory."""
    return Path(text(name, value)).expanduser()


def directory(name: str, value: Any) -> Path:
    """Read the path of a model repository, which must not be a URL."""
    if "://" in text(name, value):
        raise wrong(name, value, "a directory: copy the models out of the store first")
    return path(name, value)


def flag(name: str, value: Any) -> bool:
    """Read a Boolean: YAML's, or the text ``true`` or ``false``."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise wrong(name, value, "true or false")


def one_of(*names: str) -> Reader:
    """Return a reader of one of ``names``."""

    def read(name: str, value: Any) -> str:
        if isinstance(value, str) and value.strip().lower() in names:
            return value.strip().lower()
        hint = did_you_mean(str(value), names)
        raise wrong(name, value, f"one of {', '.join(names)}" + (f"; {hint}" if hint else ""))

    return read


def some_of(*known: str) -> Reader:
    """Return a reader of a list of ``known`` names."""
    read = one_of(*known)
    return lambda name, value: tuple(read(name, element) for element in names(name, value))


def names(name: str, value: Any) -> tuple[str, ...]:
    """Read names from a list or a comma-separated text."""
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Sequence) and value and all(isinstance(part, str) for part in value):
        return tuple(part.strip() for part in value)
    raise wrong(name, value, "a list of names")


def number(name: str, value: Any) -> int:
    """Read a nonnegative integer."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 12:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise wrong(name, value, "a whole number that is not negative")


def count(name: str, value: Any) -> int:
    """Read an integer of at least 1."""
    parsed = number(name, value)
    if parsed < 1:
        raise wrong(name, value, "a whole number of at least 1")
    return parsed


def instances(name: str, value: Any) -> int:
    """Read a number of instances, limited because each one is a process or holds the model's memory."""
    parsed = count(name, value)
    if parsed > _LONGEST:
        raise wrong(name, value, f"a number of instances, at most {_LONGEST}")
    return parsed


def positive(name: str, value: Any) -> float:
    """Read a finite number above 0."""
    try:
        parsed = float(value) if not isinstance(value, bool) else 0.0
    except (TypeError, ValueError):
        parsed = 0.0
    if not (isfinite(parsed) and parsed > 0):
        raise wrong(name, value, "a number above 0")
    return parsed


def percentage(name: str, value: Any) -> float:
    """Read a number above 0 and at most 100."""
    parsed = positive(name, value)
    if parsed > 100:
        raise wrong(name, value, "a percentage of at most 100")
    return parsed


def milliseconds(name: str, value: Any) -> float:
    """Read milliseconds; return seconds."""
    return positive(name, value) / 1000


def seconds(name: str, value: Any) -> float:
    """Read a time such as ``5m``, ``90s`` or ``1h``; a plain number is in seconds."""
    text = str(value).strip().lower()
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    unit = units.get(text[-1:])
    try:
        return positive(name, text[:-1]) * unit if unit else positive(name, text)
    except OptionProblem:
        raise wrong(name, value, "a time such as 5m, 90s or 1h") from None


def counts(name: str, value: Any) -> tuple[int, ...]:
    """Read integers of at least 1, in ascending order: a number, list, range ``a:b:s`` or ``{start, stop, step}``."""
    return _rising(name, value, count)


def rates(name: str, value: Any) -> tuple[float, ...]:
    """Read numbers above 0 in ascending order, in the forms of :func:`counts`."""
    return _rising(name, value, positive)


def _rising(name: str, value: Any, read: Reader) -> tuple[Any, ...]:
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        elements = [
            element for part in parts for element in (_span(name, part.split(":"), read) if ":" in part else [part])
        ]
    elif isinstance(value, Mapping):
        if not {"start", "stop"} <= set(value) <= {"start", "stop", "step"}:
            raise wrong(name, value, "a range with start, stop and optionally step")
        elements = _span(name, [value["start"], value["stop"], *([value["step"]] if "step" in value else [])], read)
    else:
        elements = list(value) if isinstance(value, list | tuple) else [value]
    if not elements:
        raise wrong(name, value, "a number, a list of numbers or a range")
    return tuple(sorted({read(name, element) for element in elements}))


def _span(name: str, parts: Sequence[Any], read: Reader) -> list[Any]:
    if len(parts) not in (2, 3):
        raise wrong(name, ":".join(map(str, parts)), "a range start:end or start:end:step")
    first, last = read(name, parts[0]), read(name, parts[1])
    step = read(name, parts[2]) if len(parts) == 3 else 1
    length = int((last - first) / step) + 1 if last >= first else 0
    if not 0 < length <= _LONGEST:
        raise wrong(name, ":".join(map(str, parts)), f"a range with 1 to {_LONGEST} values")
    return [first + index * step for index in range(length)]


def launch_mode(name: str, value: Any) -> str:
    """Read ``local`` or ``remote``; model analyzer's other modes are refused with the reason."""
    if value == "docker":
        raise invalid(f"{name}: conch does not start containers; start one yourself and use remote, or use local")
    if value == "c_api":
        raise invalid(f"{name}: conch measures over the network, as clients do; use local or remote")
    return str(one_of("local", "remote")(name, value))


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Read values by name: a mapping, or texts ``NAME=VALUE``."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(part, str) and "=" in part for part in texts):
        raise wrong(name, value, "NAME=VALUE")
    return {key.strip(): setting.strip() for key, _, setting in (part.partition("=") for part in texts)}


def price(name: str, value: Any) -> Price:
    """Read a price per hour: a number for the machine, or parts such as ``core=0.04,gb=0.005,gpu=2``."""
    if isinstance(value, str) and "=" in value:
        value = mapping(name, value.split(","))
    if not isinstance(value, Mapping):
        return Price(machine=positive(name, value))
    if not value or not set(value) <= {"core", "gb", "gpu"}:
        raise wrong(name, value, "a price per hour of core, gb or gpu")
    parts = {key: positive(f"{name}.{key}", amount) for key, amount in value.items()}
    return Price(core=parts.get("core", 0.0), gigabyte=parts.get("gb", 0.0), gpu=parts.get("gpu", 0.0))
