"""What the reports of an analysis are written from: the candidates in their order, what was wanted, and where.

Pure.  Made by the command from the ranking; times are seconds, memory bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from conch.analyze.judging.recommendation import Advice
from conch.analyze.judging.rounds import DefaultComparison
from conch.analyze.results import CandidateResult, LoadKind, ModelFigures, Point


@dataclass(frozen=True, slots=True)
class Placed:
    """A candidate at its place: its best point, None where it has none that counts.

    ``passing`` are the loads at which it keeps the constraints, ``broken`` the constraints that its best point does
    not keep, in words; ``score`` is how many times as good as the default it is (0: not known); ``tied`` says that it
    is within the noise of the first.
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
        """Whether its best point keeps the constraints."""
        return self.point is not None and self.point.load in self.passing

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the machine while its best point was measured."""
        return self.point is not None and self.point.disturbed

    @property
    def is_default(self) -> bool:
        """Whether it is the repository's own configuration."""
        return self.result.candidate.is_default


@dataclass(frozen=True, slots=True)
class Analysis:
    """``placed`` has every candidate, the best first; ``wanted`` says what best means, as ``highest throughput with
    p99 latency at most 100 ms``.

    ``latency_limit`` is the longest p99 latency that is allowed (None: any).  ``notes`` are sentences that cast doubt
    on the result; ``machine`` and ``settings`` are facts by name; ``reproduce`` and ``apply`` are commands.
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
    #: Whether to use the best one, why not, and the final rounds in which it was compared with the default.
    advice: Advice = "use"
    reason: str = ""
    comparison: DefaultComparison | None = None
    server: str = ""
    machine: Sequence[tuple[str, str]] = ()
    settings: Sequence[tuple[str, str]] = ()
    reproduce: str = ""
    apply: str = ""
    #: By UUID, what GPUs used with the server running and no model loaded: memory (bytes), utilisation (0 to 1), W.
    server_only: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)

    @property
    def best(self) -> Placed | None:
        """The first that keeps the constraints."""
        return next((one for one in self.placed if one.satisfied), None)

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
        """The repository's own configuration, where it was measured."""
        return next((one for one in self.placed if one.is_default), None)

    @property
    def measured(self) -> list[Placed]:
        """Those that have a point that counts."""
        return [one for one in self.placed if one.point is not None]

    @property
    def has_gpus(self) -> bool:
        """Whether anything is known of GPUs."""
        return any(point.resources and point.resources.gpus for one in self.placed for point in one.result.points)


def load_text(analysis: Analysis, load: float) -> str:
    """``concurrency 64``, ``100 requests a second``."""
    return f"concurrency {load:g}" if analysis.load_kind == "concurrency" else f"{load:g} requests a second"


def slowest(point: Point) -> ModelFigures | None:
    """The figures of the model whose 99th percentile is the longest."""
    return max(point.models.values(), key=lambda one: one.percentiles.get(99, 0.0), default=None)


def memory_of(point: Point) -> int | None:
    """Memory in use at most: of the GPUs where there are some, else of the processes."""
    if point.resources is None:
        return None
    return point.resources.gpu_memory if point.resources.gpus else point.resources.memory


def utilisation_of(point: Point) -> float | None:
    """The average share of busy time of the GPUs."""
    if point.resources is None or not point.resources.gpus:
        return None
    return sum(one.utilisation for one in point.resources.gpus.values()) / len(point.resources.gpus)
