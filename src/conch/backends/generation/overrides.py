"""Collects the sampling parameters of a request from JSON, ``parameters`` and inputs; they override the defaults.

No I/O; used by the threads that read the server's frames.
"""

from __future__ import annotations

import json
from math import isclose
from typing import Any, Final

from conch.core.errors import did_you_mean, invalid
from conch.core.sampling.parameters import IGNORED, NAMES, REFUSED
from conch.core.sampling.structures import parsed

#: Minimum similarity (``difflib`` ratio) of an unknown name and a suggested one.
_LIKENESS: Final = 0.6


class SamplingOverrides:
    """The sampling parameters that a request sets: ``values`` by field of ``SamplingParams``."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        # The source of each value, to name both sources of contradictory values.
        self._sources: dict[str, str] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a parameter; ``default`` if the request does not set it."""
        return self.values.get(name, default)

    def set(self, name: str, value: Any, source: str = "", *, label: str = "") -> bool:
        """Set a value; return False if ``name`` is not a sampling parameter.

        Messages about contradictory values name ``source``, and messages about an invalid value name ``label``. Raises
        INVALID_ARG for an invalid value, or one that contradicts a value set before for the same parameter.
        """
        known = NAMES.get(name)
        if known is None:
            return False
        if value is None:
            return True
        parameter, type = known
        typed = type.read(name, value, label or f"sampling parameter '{name}'")
        source = source or name
        key = parameter.name
        before = self.values.get(key)
        if before is None:
            if typed is not None:
                self.values[key] = typed
                self._sources[key] = source
        elif not _same(before, typed):
            raise invalid(f"{source} is {_shown(typed)}, but {self._sources[key]} is {_shown(before)}")
        return True

    def check(self) -> None:
        """Raise INVALID_ARG for values that contradict each other."""
        least, most, n = self.get("min_tokens"), self.get("max_tokens"), self.get("n", 1)
        if least is not None and most is not None and least > most:
            raise invalid(
                f"{self._sources['min_tokens']} is {least}, which is more than {self._sources['max_tokens']}, {most}"
            )
        if self.get("use_beam_search") and "beam_width" not in self.values:
            self.values["beam_width"] = max(n, 2)
        beams, temperature = self.get("beam_width", 1), self.get("temperature")
        if beams > 1:
            if temperature:
                raise invalid(f"beam search does not sample: temperature must be 0 or absent, not {temperature}")
            if n > beams:
                raise invalid(f"n is {n}, which is more than the beam width, {beams}")
        elif n > 1 and temperature == 0:
            raise invalid(f"n is {n}, but with temperature 0 all samples are the same: n must be 1")


def refuse_unsupported(name: str, value: Any) -> None:
    """Raise INVALID_ARG for a vLLM parameter that none of conch's engines supports.

    Empty and false values are accepted.
    """
    if name in REFUSED and value:
        raise invalid(f"sampling parameter '{name}' is not supported")


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return isclose(value, other, rel_tol=1e-6)  # an FP32 tensor and JSON differ by rounding
    return bool(value == other)


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)[:80]


def read_document(overrides: SamplingOverrides, text: str, source: str) -> None:
    """Set all values of the JSON object in input ``source``. Raises INVALID_ARG for invalid JSON, names or values."""
    document = parsed(f"input '{source}'", text)
    if not isinstance(document, dict):
        raise invalid(f"input '{source}' must be a JSON object, not {text[:80]}")
    for name, value in document.items():
        if overrides.set(name, value, f"{name} in '{source}'"):
            continue
        refuse_unsupported(name, value)
        if name not in IGNORED and name not in REFUSED:
            hint = did_you_mean(name, NAMES, likeness=_LIKENESS)
            raise invalid(f"sampling parameter '{name}' is not known{'; ' + hint if hint else ''}")
