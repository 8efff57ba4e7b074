"""The facts about a model that its search needs before it is measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model.

    ``config`` is its completed configuration, as the server shows it for the unchanged repository. ``variants`` are the
    usable variants in its ``conch.json``, and ``auto`` the default one. ``threads`` is the number of cores that its
    server may use. Each request has ``request_batch`` inferences, and at most ``most_waiting`` inferences are in
    flight.
    """

    name: str
    config: Mapping[str, Any]
    variants: Sequence[str] = ()
    auto: str = ""
    threads: int = 1
    request_batch: int = 1
    most_waiting: float = inf
