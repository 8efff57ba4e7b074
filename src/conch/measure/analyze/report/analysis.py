"""The data of all reports of an analysis: the ranked candidates, the goals, and the circumstances.

Pure. Made from the ranking. Times are in seconds, memory in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from conch.measure.analyze.judging.goals import in_words
from conch.measure.analyze.judging.objectives import satisfied
from conch.measure.analyze.judging.ranking import Advice, DefaultComparison, Ranking
from conch.measure.analyze.results import CandidateResult, LoadKind, ModelFigures, Point
from conch.measure.analyze.saved_results import Circumstances, SearchOutcome

#: Fields with their own columns, which are omitted from the other changes.
_SHOWN: Final = ("instance_group", "max_batch_size", "dynamic_batching", "name")


@dataclass(frozen=True, slots=True)
class ConfigTraits:
    """Batching and instances of a model: ``instances`` by kind (``GPU``, ``CPU``), queue ``delay`` (µs)."""

    max_batch_size: int
    batching: bool
    preferred: tuple[int, ...]
    delay: int
    instances: Mapping[str, int]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, gpus: bool = False) -> ConfigTraits:
        """Return the traits of a JSON configuration; ``gpus`` is whether groups without a kind run on GPUs."""
        batching = config.get("dynamic_batching")
        instances: Counter[str] = Counter()
        for group in config.get("instance_group") or [{}]:
            kind = str(group.get("kind", "KIND_AUTO")).removeprefix("KIND_")
            devices = len(group.get("gpus") or ()) if kind in ("GPU", "AUTO") else 0
            instances["GPU" if kind == "AUTO" and gpus else "CPU" if kind == "AUTO" else kind] += (
                int(group.get("count", 0)) or 1
            ) * max(1, devices)
        dynamic = batching or {}
        return cls(
            int(config.get("max_batch_size", 0)),
            batching is not None,
            tuple(int(size) for size in dynamic.get("preferred_batch_size") or ()),
            int(dynamic.get("max_queue_delay_microseconds", 0)),
            dict(instances),
        )

    @property
    def instance_text(self) -> str:
        """The instances in model analyzer's format: ``3:GPU``."""
        return " + ".join(f"{count}:{kind}" for kind, count in self.instances.items())

    @property
    def total(self) -> int:
        """The number of instances of all kinds."""
        return sum(self.instances.values())


def traits_of(result: CandidateResult, model: str, *, gpus: bool) -> ConfigTraits:
    """Return the traits of the configuration in force, or else of the candidate's overrides."""
    config = result.configs.get(model) or result.candidate.overrides.get(model) or {}
    return ConfigTraits.of(config, gpus=gpus)


def other_changes(result: CandidateResult, model: str) -> str:
    """Return the candidate's other changes, such as ``precision=int8, threads=2``; empty if there are none."""
    overrides = result.candidate.overrides.get(model, {})
    rest = {name: value for name, value in overrides.items() if name not in _SHOWN}
    return ", ".join(f"{name}={value}" for name, value in _flat("", rest))


def _flat(prefix: str, of: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in of.items():
        # In {"threads": {"string_value": "2"}}, the names around the value are redundant.
        whole = prefix if name == "string_value" else name if prefix in ("", "parameters") else f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _flat(whole, value)
        else:
            yield whole, value


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A ranked candidate with its best point (None if it has no valid one).

    ``passing`` are the loads at which it satisfies the constraints, and ``broken`` the constraints that its best point
    violates, as text. ``score`` is relative to the default (0: unknown). ``tied`` is whether the score is within the
    noise of the first candidate's.
    """

    result: CandidateResult
    point: Point | None
    passing: frozenset[float] = frozenset()
    broken: Sequence[str] = ()
    score: float = 0.0
    tied: bool = False

    @property
    def name(self) -> str:
        """The candidate's name."""
        return self.result.candidate.name

    @property
    def satisfied(self) -> bool:
        """Whether the best point satisfies the constraints."""
        return self.point is not None and self.point.load in self.passing

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the machine during the measurement of the best point."""
        return self.point is not None and self.point.disturbed

    @property
    def is_default(self) -> bool:
        """Whether this is the repository's own configuration."""
        return self.result.candidate.is_default


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result of one search; ``candidates`` has every candidate, the best first.

    ``goal`` describes the goals, such as ``highest throughput with p99 latency at most 100 ms``. ``latency_limit``
    is the maximum p99 latency (None: no limit). ``notes`` are sentences with doubts about the result. ``machine`` and
    ``settings`` are facts by name; ``reproduce`` and ``apply`` are commands.
    """

    models: Sequence[str]
    goal: str
    candidates: Sequence[RankedCandidate]
    load_kind: LoadKind = "concurrency"
    #: The number of inferences in a request, by model.
    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    latency_limit: float | None = None
    notes: Sequence[str] = ()
    #: Whether throughput is the only objective.
    only_throughput: bool = False
    #: The advice, the reason against the best configuration, and its comparison with the default in the final rounds.
    advice: Advice = "use"
    reason: str = ""
    comparison: DefaultComparison | None = None
    server: str = ""
    machine: Sequence[tuple[str, str]] = ()
    settings: Sequence[tuple[str, str]] = ()
    reproduce: str = ""
    apply: str = ""

    @property
    def best(self) -> RankedCandidate | None:
        """The first configuration that satisfies the constraints."""
        return next((candidate for candidate in self.candidates if candidate.satisfied), None)

    @property
    def recommended(self) -> RankedCandidate | None:
        """The configuration to use: the best one, or the repository's own; None if nothing is proven."""
        return {"use": self.best, "keep": self.default}.get(self.advice)

    @property
    def disturbed(self) -> bool:
        """Whether the measurements behind the result for the best configuration were disturbed."""
        if self.comparison is not None:
            return self.comparison.disturbed
        return self.best is not None and self.best.disturbed

    @property
    def default(self) -> RankedCandidate | None:
        """The repository's own configuration, if it was measured."""
        return next((candidate for candidate in self.candidates if candidate.is_default), None)

    @property
    def measured(self) -> list[RankedCandidate]:
        """The candidates with a best point."""
        return [candidate for candidate in self.candidates if candidate.point is not None]

    @property
    def has_gpus(self) -> bool:
        """Whether any point has figures of GPUs."""
        return any(
            point.resources and point.resources.gpus
            for candidate in self.candidates
            for point in candidate.result.points
        )


def load_text(analysis: Analysis, load: float) -> str:
    """Format a load: ``concurrency 64``, ``100 requests per second``."""
    return f"concurrency {load:g}" if analysis.load_kind == "concurrency" else f"{load:g} requests per second"


def slowest(point: Point) -> ModelFigures | None:
    """Return the figures of the model with the highest p99 latency."""
    return max(point.models.values(), key=lambda figures: figures.percentiles.get(99, 0.0), default=None)


def memory_of(point: Point) -> int | None:
    """Return the maximum memory in use: of the GPUs if there are any, otherwise of the processes."""
    if point.resources is None:
        return None
    return point.resources.gpu_memory if point.resources.gpus else point.resources.memory


def utilisation_of(point: Point) -> float | None:
    """Return the average utilization of the GPUs."""
    return point.resources.gpu_utilisation if point.resources is not None else None


def analysis_of(search: SearchOutcome, circumstances: Circumstances, apply: str = "") -> Analysis:
    """Return the analysis of a search; ``apply`` is the command that applies the best configuration."""
    recommendation = search.recommendation
    ranking = recommendation.ranking
    limits = [
        constraint.maximum
        for model_goals in search.goals.models.values()
        for constraint in model_goals.constraints
        if constraint.metric == "latency_p99" and constraint.maximum is not None
    ]
    notes = list(ranking.cautions)
    if not search.complete:
        notes.append("The search was interrupted, so that a better configuration may not have been tried.")
    return Analysis(
        models=search.models,
        goal=in_words(search.goals),
        candidates=_ranked_candidates(search, ranking),
        load_kind=circumstances.load_kind,
        batch_sizes=circumstances.batch_sizes,
        latency_limit=min(limits, default=None),
        notes=notes,
        only_throughput=all(
            objective.metric == "throughput" for model in search.goals.models.values() for objective in model.objectives
        ),
        advice=recommendation.advice,
        reason=recommendation.reason,
        comparison=recommendation.comparison,
        server=circumstances.server,
        machine=circumstances.machine,
        settings=circumstances.settings,
        reproduce=circumstances.reproduce,
        apply=apply,
    )


def _ranked_candidates(search: SearchOutcome, ranking: Ranking) -> list[RankedCandidate]:
    rows = [
        RankedCandidate(
            row.result,
            row.point,
            frozenset(point.load for point in row.result.points if satisfied(point, search.goals)),
            tuple(dict.fromkeys(map(str, row.violations))),
            row.score,
            row.tied,
        )
        for row in ranking.rows
    ]
    names = {row.name for row in rows}
    return [*rows, *(RankedCandidate(result, None) for result in search.results if result.candidate.name not in names)]
