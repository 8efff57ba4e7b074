"""The data of all reports of an analysis: the ranked candidates, the goals, and the circumstances.

Pure. Made from the ranking. Times are in seconds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conch.measure.analyze.judging.ranking import Advice, DefaultComparison
from conch.measure.analyze.results import CandidateResult, LoadKind, ModelFigures, Point


@dataclass(frozen=True, slots=True)
class Placed:
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
    """The result of one search; ``placed`` has every candidate, the best first.

    ``wanted`` are the goals as text, such as ``highest throughput with p99 latency at most 100 ms``. ``latency_limit``
    is the maximum p99 latency (None: no limit). ``notes`` are sentences with doubts about the result. ``machine`` and
    ``settings`` are facts by name; ``reproduce`` and ``apply`` are commands.
    """

    models: Sequence[str]
    wanted: str
    placed: Sequence[Placed]
    load_kind: LoadKind = "concurrency"
    batch_size: int = 1
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
    #: By UUID, the use of GPUs by the server without loaded models: memory (bytes), utilization (0 to 1), power (W).
    server_only: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)

    @property
    def best(self) -> Placed | None:
        """The first configuration that satisfies the constraints."""
        return next((candidate for candidate in self.placed if candidate.satisfied), None)

    @property
    def recommended(self) -> Placed | None:
        """The configuration to use: the best one, or the repository's own; None if nothing is proven."""
        return {"use": self.best, "keep": self.default}.get(self.advice)

    @property
    def disturbed(self) -> bool:
        """Whether the measurements behind the result for the best configuration were disturbed."""
        if self.comparison is not None:
            return self.comparison.disturbed
        return self.best is not None and self.best.disturbed

    @property
    def default(self) -> Placed | None:
        """The repository's own configuration, if it was measured."""
        return next((candidate for candidate in self.placed if candidate.is_default), None)

    @property
    def measured(self) -> list[Placed]:
        """The candidates with a best point."""
        return [candidate for candidate in self.placed if candidate.point is not None]

    @property
    def has_gpus(self) -> bool:
        """Whether any point has figures of GPUs."""
        return any(
            point.resources and point.resources.gpus for candidate in self.placed for point in candidate.result.points
        )


def load_text(analysis: Analysis, load: float) -> str:
    """Format a load: ``concurrency 64``, ``100 requests a second``."""
    return f"concurrency {load:g}" if analysis.load_kind == "concurrency" else f"{load:g} requests a second"


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
    if point.resources is None or not point.resources.gpus:
        return None
    return sum(gpu.utilisation for gpu in point.resources.gpus.values()) / len(point.resources.gpus)
