"""Differences of the server's statistics before and after a window.

Pure. Statistics are ``model_stats`` of the statistics extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: The stages of a request in the server, in order, as named in the statistics.
SERVER_STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")
#: All durations in the statistics.
STAGES: Final = ("success", *SERVER_STAGES, "cache_hit", "cache_miss", "fail")


@dataclass(frozen=True, slots=True)
class Stage:
    """The number of executions of a stage, and their average duration (s)."""

    count: int
    average: float


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The statistics of one model version in one window: ``inferences``, ``executions``, and stages by name."""

    model: str
    version: str
    inferences: int
    executions: int
    stages: Mapping[str, Stage]

    @property
    def batch_size(self) -> float:
        """The average number of inferences per execution, 0 without executions."""
        return self.inferences / self.executions if self.executions else 0.0


def differences(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[ServerFigures]:
    """Return the differences of each model version between two readings; versions without activity are omitted.

    If a counter decreased, the version was reloaded and counts from zero.
    """
    known = {(version["name"], version.get("version", "")): version for version in before}
    figures = []
    for now in after:
        key = (now["name"], now.get("version", ""))
        then = known.get(key, {})
        if any(count < before for before, count in zip(_counters(then), _counters(now), strict=True)):
            then = {}
        inferences = _number(now, "inference_count") - _number(then, "inference_count")
        executions = _number(now, "execution_count") - _number(then, "execution_count")
        stages = {name: stage for name in STAGES if (stage := _stage(name, then, now)).count}
        if inferences or stages:
            figures.append(ServerFigures(*key, inferences, executions, stages))
    return figures


def added(windows: Sequence[Sequence[ServerFigures]]) -> list[ServerFigures]:
    """Return the sum of each model version's figures over several windows."""
    versions: dict[tuple[str, str], list[ServerFigures]] = {}
    for window in windows:
        for figures in window:
            versions.setdefault((figures.model, figures.version), []).append(figures)
    return [
        ServerFigures(
            *key, sum(part.inferences for part in parts), sum(part.executions for part in parts),
            {name: stage for name in STAGES if (stage := _added([part.stages.get(name) for part in parts])).count},
        )
        for key, parts in versions.items()
    ]  # fmt: skip


def _added(stages: Sequence[Stage | None]) -> Stage:
    known = [stage for stage in stages if stage is not None]
    count = sum(stage.count for stage in known)
    return Stage(count, sum(stage.count * stage.average for stage in known) / count if count else 0.0)


def _stage(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Stage:
    then, now = (version.get("inference_stats", {}).get(name, {}) for version in (before, after))
    count = _number(now, "count") - _number(then, "count")
    nanoseconds = _number(now, "ns") - _number(then, "ns")
    return Stage(count, nanoseconds / count / 1e9 if count else 0.0)


def _counters(version: Mapping[str, Any]) -> list[int]:
    stages = version.get("inference_stats", {})
    counters = [_number(version, "inference_count"), _number(version, "execution_count")]
    return counters + [_number(stages.get(name, {}), kind) for name in STAGES for kind in ("count", "ns")]


def _number(of: Mapping[str, Any], name: str) -> int:
    """Return a counter; the JSON of protocol buffers has 64-bit numbers as strings, and omits 0."""
    return int(of.get(name, 0))
