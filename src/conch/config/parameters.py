"""The names that a model's ``parameters`` may have under a backend, and the errors for other names.

Each backend of conch declares its parameters once, as a :class:`ParameterTable`. Workers check a configuration against
it when they load the model, ``conch check`` does so in advance, and a test compares it with the documentation. Needs
only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from conch.core.errors import ConchError, did_you_mean, invalid

#: Minimum similarity (``difflib``'s ratio) at which an unknown name counts as a misspelling of a known one.
#: ``_MISSPELT`` applies where other unknown names are accepted, ``_SUGGESTED`` where all of them are refused.
_MISSPELT = 0.85
_SUGGESTED = 0.7


def parameter_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the ``parameters`` of a configuration (JSON object), by name."""
    return {name: str(value.get("string_value", "")) for name, value in (config.get("parameters") or {}).items()}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A documented parameter of a model: its possible values, its default, and its meaning."""

    name: str
    values: str
    default: str
    help: str


@dataclass(frozen=True)
class ParameterTable:
    """The names that a model's ``parameters`` may have under one backend.

    ``declared`` names are documented. ``accepted`` names are aliases, and names that repositories written for Triton's
    backend of this name contain. Names with ``prefix`` are passed to a library unchanged. A ``strict`` table refuses
    every other name; any other table refuses only likely misspellings, because Triton allows users to store their own
    data in the parameters.
    """

    backend: str
    declared: tuple[Parameter, ...] = ()
    accepted: frozenset[str] = frozenset()
    prefix: str = ""
    strict: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        """All known names."""
        return self.accepted | {parameter.name for parameter in self.declared}

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the unknown names, sorted."""
        return sorted(
            name for name in names if name not in self.names and not (self.prefix and name.startswith(self.prefix))
        )

    def problem(self, name: str) -> ConchError | None:
        """Return the error for the unknown ``name`` (INVALID_ARG); None if it is accepted without effect."""
        hint = did_you_mean(name, self.names, likeness=_SUGGESTED if self.strict else _MISSPELT)
        if hint:
            return invalid(f"parameter '{name}' is not known; {hint}")
        if self.strict:
            return invalid(
                f"parameter '{name}' is unknown to backend '{self.backend}'; it has {', '.join(sorted(self.names))}"
            )
        return None

    def check(self, names: Iterable[str]) -> list[str]:
        """Return the names without effect, sorted, for the log. Raises INVALID_ARG for a refused name."""
        unknown = self.unknown(names)
        for name in unknown:
            problem = self.problem(name)
            if problem is not None:
                raise problem
        return unknown
