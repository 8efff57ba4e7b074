"""The results of an analysis: the candidates, the measurements to make, and the point of each at each load.

Pure. Profiling (:mod:`conch.measure.analyze.profiling.profile`) creates them, the journal keeps them, and the ranking
and the reports read them. Times are in seconds, memory in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from conch.measure.perf.server.resources import ResourceFigures

#: The kind of load: concurrent callers, or requests per second.
LoadKind = Literal["concurrency", "request_rate"]


#: Suffix of the name of the repository's own configuration.
DEFAULT: Final = "_config_default"
_NAME: Final = re.compile(r".+_config_(default|\d+)")


def is_name_of_candidate(name: str) -> bool:
    """Return whether a name has the form of candidates' names."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration of all profiled models.

    ``overrides`` are, by model, the fields that differ from the repository's configuration, nested and named as in
    ``GET /v2/models/M/config`` (``{"instance_group": [{"count": 2}]}``): messages are merged, lists are replaced, and
    None removes a field. ``name`` is unique, such as ``falcon7b_config_7``. ``falcon7b_config_default`` is the
    repository's own configuration; it has only the overrides that all candidates share.
    """

    name: str
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_default(self) -> bool:
        """Whether this is the repository's own configuration."""
        return self.name.endswith(DEFAULT)


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """The figures of one model at one load: throughput, client latency and its stages.

    ``throughput`` is in inferences per second. ``percentiles`` are by number (50, 90, 95, 99). ``client_wait`` is the
    time from the last byte sent to the first byte received, and ``stages`` the averages of the server's ``queue``,
    ``compute_input``, ``compute_infer`` and ``compute_output``. ``failed`` counts failed requests, which are excluded
    from the latencies. ``noise`` is the relative standard error over the windows, by figure
    (:mod:`conch.measure.analyze.judging.goals`).
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
    """The measurement of a candidate at one load: all models at the same time, and the server's resources.

    ``disturbed`` is whether other processes used the machine; ``warnings`` are sentences. ``stopped`` is set if the
    measurement ended early because the candidate was clearly worse than another.
    """

    load: float
    models: Mapping[str, ModelFigures]
    resources: ResourceFigures | None
    disturbed: bool = False
    warnings: Sequence[str] = ()
    stopped: bool = False

    @property
    def throughput(self) -> float:
        """The throughput of all models together (inferences per second)."""
        return sum(figures.throughput for figures in self.models.values())


class Trial(NamedTuple):
    """A measurement to make: a candidate at a load.

    ``rival`` is the point to beat if only a winner is of use; the measurement may then end early
    (:mod:`conch.measure.analyze.judging.objectives`). Without a rival it is completed. A repeated trial is measured
    again. ``finalist`` is the candidate of the final rounds that the trial belongs to; None in the search.
    """

    candidate: Candidate
    load: float
    rival: Point | None = None
    finalist: Candidate | None = None


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """A candidate with its points in order of load; ``error`` is the reason if it could not be served or measured."""

    candidate: Candidate
    points: Sequence[Point] = ()
    error: str = ""
    #: The configurations in force, by model, as shown by the server.
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def from_json(kind: Any, value: Any) -> Any:
    """Return the ``kind`` that ``dataclasses.asdict`` and JSON have turned into ``value``; sequences become tuples.

    Raises Python's own errors for other content.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        types = _types(kind)
        return kind(**{name: from_json(types[name], part) for name, part in value.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        [of_value] = (argument for argument in arguments if argument is not NoneType)
        return None if value is None else from_json(of_value, value)
    if origin is Mapping:
        key, element = arguments
        return {float(name) if key is float else name: from_json(element, part) for name, part in value.items()}
    if origin in (Sequence, tuple):
        return tuple(from_json(arguments[0], part) for part in value)
    return value


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
