"""Converts the results of a search into the data of its reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from conch.measure.analyze.judging.goals import Goals, in_words
from conch.measure.analyze.judging.objectives import satisfied
from conch.measure.analyze.judging.ranking import Ranking, recommend
from conch.measure.analyze.report.analysis import Analysis, Placed
from conch.measure.analyze.results import Point
from conch.measure.analyze.saved_results import Circumstances, SavedSearch


def analysis_of(search: SavedSearch, circumstances: Circumstances, apply: str = "") -> Analysis:
    """Return the analysis of a search; ``apply`` is the command that applies the best configuration."""
    recommendation = recommend(search.results, search.goals, search.final, complete=search.complete)
    ranking = recommendation.ranking
    limits = [
        constraint.maximum
        for wanted in search.goals.models.values()
        for constraint in wanted.constraints
        if constraint.metric == "latency_p99" and constraint.maximum is not None
    ]
    notes = list(ranking.cautions)
    if not search.complete:
        notes.append("The search was interrupted, so that a better configuration may not have been tried.")
    return Analysis(
        models=search.models,
        wanted=in_words(search.goals),
        placed=_placed(search, ranking),
        load_kind=circumstances.load_kind,
        batch_size=circumstances.batch_sizes.get(search.models[0], 1),
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


def _placed(search: SavedSearch, ranking: Ranking) -> list[Placed]:
    rows = [
        Placed(
            row.result,
            row.point,
            _passing(row.result.points, search.goals),
            tuple(dict.fromkeys(map(str, row.violations))),
            row.score,
            row.tied,
        )
        for row in ranking.rows
    ]
    names = {row.name for row in rows}
    return [*rows, *(Placed(result, None) for result in search.results if result.candidate.name not in names)]


def _passing(points: Sequence[Point], goals: Goals) -> frozenset[float]:
    return frozenset(point.load for point in points if satisfied(point, goals))
