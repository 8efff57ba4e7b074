"""Points of measurements, with round figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conch.measure.analyze.judging.goals import Constraint, Goals, ModelGoals, Price, WeightedObjective
from conch.measure.analyze.results import Candidate, CandidateResult, ModelFigures, Point
from conch.measure.perf.server.resources import GpuFigures, ResourceFigures


def figures(
    throughput: float = 100.0, p99: float = 0.02, *, requests: int = 1000, failed: int = 0,
    noise: Mapping[str, float] | None = None,
) -> ModelFigures:  # fmt: skip
    return ModelFigures(
        throughput, p99 / 2, {50: p99 / 2, 99: p99}, 0.0001, p99 / 2, {"queue": p99 / 4}, requests, failed, noise or {}
    )  # fmt: skip


def point(
    throughput: float = 100.0, p99: float = 0.02, *, load: float = 8, memory: int = 10**9, gpu: int = 0, **more: Any
) -> Point:
    """A point of the model ``m``, on two cores."""
    gpus = {"GPU-1": GpuFigures(0.5, gpu)} if gpu else {}
    own = {name: more.pop(name) for name in ("failed", "noise") if name in more}
    return Point(load, {"m": figures(throughput, p99, **own)}, ResourceFigures(2.0, memory, gpus), **more)


def result(
    name: str, *points: Point, instances: int = 0, overrides: Mapping[str, Any] | None = None, error: str = ""
) -> CandidateResult:
    """A candidate of so many instances of ``m``; none stands for the repository's own configuration with one."""
    changed = {"instance_group": [{"count": instances}]} if instances else {}
    changed |= overrides or {}
    configs = {"m": {"instance_group": [{"count": 1}], **changed}}
    return CandidateResult(Candidate(name, {"m": changed} if changed else {}), points, error, configs)


def goals(
    *objectives: WeightedObjective, constraints: Sequence[Constraint] = (), price: Price | None = None
) -> Goals:  # fmt: skip
    wanted = ModelGoals(objectives or (WeightedObjective("throughput"),), tuple(constraints))
    return Goals({"m": wanted}, price or Price())
