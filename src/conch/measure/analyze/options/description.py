"""Formats options and their values for reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.measure.analyze.judging.goals import Constraint, Price, WeightedObjective, bounds
from conch.measure.analyze.options.models import ModelSettings

#: Options that are given in milliseconds and stored in seconds.
_MILLISECONDS: Final = ("latency_budget",)


def described(name: str, value: Any) -> str:
    """Format the value of the option ``name`` as a user would write it."""
    if name in _MILLISECONDS:
        return f"{1000 * value:g} ms"
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case WeightedObjective():
            return value.metric if value.weight == 1 else f"{value.metric} (weight {value.weight:g})"
        case Constraint():
            return " and ".join(bounds(value))
        case Price():
            parts = {"core": value.core, "GB": value.gigabyte, "GPU": value.gpu}
            by_use = ", ".join(f"{price:g} a {part}" for part, price in parts.items() if price)
            return f"{value.machine:g} an hour" if value.machine else f"{by_use} an hour"
        case ModelSettings():
            return value.name
        case Mapping():
            return ", ".join(f"{key}={described('', element)}" for key, element in value.items())
        case tuple() | list():
            return ", ".join(described("", element) for element in value)
    return str(value)
