"""Warns of outputs that a model gives and its configuration does not declare, and of declared ones that do not come.

On the wire both are as in Triton: the one is left out, the other missing, and nobody is told.  Runs in the worker of a
Python model, in whatever thread the model uses.
"""

from __future__ import annotations

from typing import AbstractSet, Any, Callable, FrozenSet, Mapping, Sequence, Set

from conch.backends.python.tensor import Tensor

#: How many outputs are warned of: a model may make up names.
_MOST = 16


class OutputWatch:
    """Looks at the responses of the model ``name``; ``warn`` logs a message."""

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self._name = name
        self._warn = warn
        self._declared: FrozenSet[str] = frozenset()
        self._told: Set[str] = set()

    def declare(self, config: Mapping[str, Any]) -> None:
        """Take the outputs from the model's effective configuration."""
        self._declared = frozenset(output["name"] for output in config.get("output", ()))

    def look(self, tensors: Sequence[Tensor], wanted: AbstractSet[str], whole: bool) -> None:
        """Look at a response to a request for the outputs ``wanted``; ``whole``: no other response follows."""
        for tensor in tensors:
            if tensor._name not in wanted:
                break
        else:
            if len(tensors) == len(wanted):
                return  # as nearly always
        names = [tensor._name for tensor in tensors]
        for name in names:
            if name not in self._declared and self._is_news(name):
                declared = ", ".join("'%s'" % one for one in sorted(self._declared))
                self._warn(
                    "model '%s' gave the output '%s', which its configuration does not declare (it declares %s); "
                    "clients do not get it" % (self._name, name, declared)
                )
        for name in sorted(wanted - set(names)) if whole else ():
            if self._is_news(name):
                self._warn(
                    "model '%s' did not give the output '%s', which its configuration declares and a request wanted; "
                    "its response came without it" % (self._name, name)
                )

    def _is_news(self, name: str) -> bool:
        if name in self._told or len(self._told) >= _MOST:
            return False
        self._told.add(name)
        return True
