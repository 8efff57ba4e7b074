"""What an analysis finds out: the candidates, and what each measured at each load.

Pure.  Written while profiling (:mod:`conch.analyze.profiling.profile`), kept in the checkpoint, read by the ranking and
by the reports.  Times are seconds, memory bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from conch.perf.server.resources import ResourceFigures

#: What is swept besides configurations: callers at a time, or requests a second.
LoadKind = Literal["concurrency", "request_rate"]


#: What the name of the repository's own configuration ends with.
DEFAULT: Final = "_config_default"
_NAME: Final = re.compile(r".+_config_(default|\d+)")


def is_name_of_candidate(name: str) -> bool:
    """Whether a name is like those of candidates."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration of all profiled models.

    ``overrides`` are by model the fields of its configuration that differ from the repository's, nested and named as
    ``GET /v2/models/M/config`` shows them (``{"instance_group": [{"count": 2}]}``): messages are merged into it, lists
    replaced, and None takes a field away.  ``name`` is unique, as
    ``falcon7b_config_7``; ``falcon7b_config_default`` is the repository's own configuration, which overrides nothing
    but what holds for all candidates.
    """

    name: str
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_default(self) -> bool:
        """Whether it is the repository's own configuration."""
        return self.name.endswith(DEFAULT)


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model at one load: inferences a second, its latency as clients see it, and the stages that make it up.

    ``percentiles`` by number (50, 90, 95, 99); ``client_wait`` is from the last byte sent to the first byte received,
    ``stages`` the averages of the server's ``queue``, ``compute_input``, ``compute_infer`` and ``compute_output``.
    ``failed`` counts requests that were not answered well, which are not among the latencies.  ``noise`` has by a
    figure's name (:mod:`conch.analyze.judging.metrics`) its standard error over the windows, as a share of it.
    """

    throughput: float
    average: float
    percentiles: Mapping[float, float]
    client_send: float
    client_wait: float
    stages: Mapping[str, float]
    requests: int
    failed: int = 0
    noise: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate at one load: all models at the same time, and what the server used meanwhile.

    ``disturbed`` says that other processes used the machine; ``warnings`` are sentences.  ``stopped``
    is set where measuring ended early, because the candidate was clearly worse than another.
    """

    load: float
    models: Mapping[str, ModelFigures]
    resources: ResourceFigures | None
    disturbed: bool = False
    warnings: Sequence[str] = ()
    stopped: bool = False

    @property
    def throughput(self) -> float:
        """Inferences a second of all models together."""
        return sum(figures.throughput for figures in self.models.values())


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """A candidate with its points, by rising load; ``error`` is why it could not be served or measured."""

    candidate: Candidate
    points: Sequence[Point] = ()
    error: str = ""
    #: The configurations in force, by model, as the server shows them.
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
