"""Formats goals as text, such as ``highest throughput with p99 latency at most 100 ms``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from conch.measure.analyze.judging.goals import Constraint, Goals, ModelGoals
from conch.measure.analyze.judging.metrics import Figure, metric

#: Figures described as "least" rather than "lowest", because they are amounts.
_LEAST: Final = ("memory", "gpu_memory", "cores")


def in_words(goals: Goals) -> str:
    """Return the goals as text: one phrase if all models have the same goals, otherwise one per model."""
    phrases = {name: _phrase(wanted) for name, wanted in goals.models.items()}
    if len(set(phrases.values())) == 1:
        return next(iter(phrases.values()))
    return "; ".join(f"{name}: {phrase}" for name, phrase in phrases.items())


def title(figure: Figure) -> str:
    """Return the name of a figure for sentences: ``p99 latency``."""
    name = figure.name
    if name.startswith("latency_p"):
        return f"{name.removeprefix('latency_')} latency"
    if name == "latency_average":
        return "average latency"
    return name.replace("gpu_", "GPU ").replace("_", " ")


def _phrase(wanted: ModelGoals) -> str:
    weighted = len({objective.weight for objective in wanted.objectives}) > 1
    wishes = []
    for objective in wanted.objectives:
        figure = _figure(objective.metric)
        wish = "highest" if figure.more_is_better else "least" if figure.name in _LEAST else "lowest"
        wishes.append(f"{wish} {title(figure)}" + (f" (weight {objective.weight:g})" if weighted else ""))
    limits = [bound for constraint in wanted.constraints for bound in bounds(constraint)]
    return _listed(wishes) + (f" with {_listed(limits)}" if limits else "")


def bounds(constraint: Constraint) -> list[str]:
    """Return a constraint as text: ``p99 latency at most 100 ms``."""
    figure = _figure(constraint.metric)
    ends = (("at least", constraint.minimum), ("at most", constraint.maximum))
    return [f"{title(figure)} {end} {figure.shown(value)}" for end, value in ends if value is not None]


def _figure(name: str) -> Figure:
    figure = metric(name)
    assert figure is not None, name
    return figure


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
