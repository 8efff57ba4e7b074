"""The names that a model's ``parameters`` may have under a backend, and what is said of any other name.

Every backend of conch's own declares its parameters once, as a :class:`ParameterTable`.  Workers check a model's
configuration against it when they load the model, ``conch check`` does so beforehand, and a test compares it with the
documents.  Needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from conch.errors import ConchError, did_you_mean, invalid

#: How alike (``difflib``'s ratio) two names are when one is taken for the other misspelt: where unknown names are
#: accepted, and where they are refused anyway and this only chooses the suggestion.
_MISSPELT = 0.85
_SUGGESTED = 0.7


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model as the documents describe it: the values it may have, its default, and its meaning."""

    name: str
    values: str
    default: str
    help: str


@dataclass(frozen=True)
class ParameterTable:
    """The names that a model's ``parameters`` may have under one backend.

    ``declared`` are documented; ``accepted`` are known besides: aliases, and those that repositories written for
    Triton's backend of this name carry.  Names that begin with ``prefix`` are handed to a library as they are.  A
    ``strict`` table refuses every other name; any other table refuses only those that look like a known name misspelt,
    as Triton lets users keep data of their own among the parameters.
    """

    backend: str
    declared: tuple[Parameter, ...] = ()
    accepted: frozenset[str] = frozenset()
    prefix: str = ""
    strict: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        """All names that are known."""
        return self.accepted | {parameter.name for parameter in self.declared}

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are not known, sorted."""
        return sorted(
            name for name in names if name not in self.names and not (self.prefix and name.startswith(self.prefix))
        )

    def problem(self, name: str) -> ConchError | None:
        """Why the unknown ``name`` is refused (INVALID_ARG); None where it is accepted and has no effect."""
        hint = did_you_mean(name, self.names, likeness=_SUGGESTED if self.strict else _MISSPELT)
        if hint:
            return invalid(f"parameter '{name}' is not known; {hint}")
        if self.strict:
            return invalid(
                f"parameter '{name}' is not known to backend '{self.backend}'; it has {', '.join(sorted(self.names))}"
            )
        return None

    def check(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that have no effect, sorted, to be logged.  Raises INVALID_ARG for a refused one."""
        unknown = self.unknown(names)
        for name in unknown:
            problem = self.problem(name)
            if problem is not None:
                raise problem
        return unknown
