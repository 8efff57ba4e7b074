"""What is known of a model before it is measured.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What has to be known of a model to search it.

    ``config`` is its completed configuration, as the server shows it for the repository as it is; ``variants`` the
    names in its ``conch.json`` that may serve, ``auto`` the one that does so unasked; ``threads`` the
    cores that its server may use.  Each request has ``request_batch`` inferences, and at most ``most_waiting``
    inferences are in flight.
    """

    name: str
    config: Mapping[str, Any]
    variants: Sequence[str] = ()
    auto: str = ""
    threads: int = 1
    request_batch: int = 1
    most_waiting: float = inf
