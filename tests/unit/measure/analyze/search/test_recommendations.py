"""A recommendation is never worse than what one has: searches with final rounds on a thousand simulated servers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conch.measure.analyze.judging.goals import Constraint
from conch.measure.analyze.judging.objectives import excess
from conch.measure.analyze.judging.ranking import Recommendation, recommend
from conch.measure.analyze.options.settings import AnalyzeSettings, models
from conch.measure.analyze.results import Candidate
from conch.measure.analyze.search.searches import Search, searches
from conch.measure.analyze.search.space import ModelFacts
from conch.measure.analyze.search.strategies import strategy_of
from tests.unit.measure.analyze.configs import batching_model
from tests.unit.measure.analyze.simulated import SharedServer, SimulatedServer, Step, drawn_shape

SEEDS = 1000
PARTS = 4
LOADS = (*range(1, 33), *(round(32 * 2 ** (step / 4)) for step in range(1, 21)))


@dataclass(frozen=True)
class Analysis:
    """One simulated analysis, and what came out."""

    search: Search
    server: SimulatedServer
    recommendation: Recommendation
    noise: float
    loads: tuple[int, ...]

    def best(self, candidate: Candidate, tolerance: float = 0.0) -> float:
        """The throughput that a candidate really has, at the best of all loads that break no bound by more than
        ``tolerance``."""
        points = (self.server.exact(candidate, load) for load in self.loads)
        return max((point.throughput for point in points if excess(point, self.search.goals) <= tolerance), default=0.0)


def analysis(seed: int) -> Analysis:
    """An analysis of which all is drawn: the model, its configuration, the bound, the noise, other load, and after how
    many measurements the time for the search is up."""
    draw = random.Random(seed)
    noise, shape = draw.uniform(0.005, 0.04), drawn_shape(draw)
    config = batching_model(max_batch_size=draw.choice((1, 8, 32, 128)))
    config["instance_group"][0]["count"] = draw.choice((1, 1, 2))
    settings = AnalyzeSettings(
        run_config_search_mode="quick",
        sweep=("instances", "batch", "delay") if draw.random() < 0.3 else ("instances", "batch"),
        profile_models=models("profile_models", "m"),
        concurrency=tuple(sorted(draw.sample(range(1, 65), 3))) if draw.random() < 0.1 else (),
        constraints=tuple(_bounds(draw, SimulatedServer(shape, config))),
    )
    (search,) = searches(settings, {"m": ModelFacts("m", config)})
    server = SharedServer(shape, config, list(_steps(draw)), noise=noise, seed=seed)
    strategy = strategy_of(settings, search)
    ends = draw.randint(5, 40) if draw.random() < 0.3 else 1000
    while (trial := strategy.next()) is not None:
        strategy.add(trial, server.measure(trial.candidate, trial.load))
        if len(server.measured) == ends:
            strategy.end_phase()
    found = recommend(strategy.results, search.goals, strategy.final, complete=True)
    return Analysis(search, server, found, noise, settings.concurrency or LOADS)


def _bounds(draw: random.Random, server: SimulatedServer) -> Iterator[Constraint]:
    """None, or a bound of latency that the default keeps up to some load."""
    if draw.random() < 0.7:
        (search,) = searches(
            AnalyzeSettings(profile_models=models("profile_models", "m")), {"m": ModelFacts("m", server.config)}
        )
        load = 2 ** draw.uniform(-0.5, 7)
        yield Constraint("latency_p99", maximum=server.exact(search.space.default, load).models["m"].percentiles[99])


def _steps(draw: random.Random) -> Iterator[Step]:
    """Other load that comes at any time, for a short or a long while."""
    for _ in range(draw.choice((0, 0, 1, 2, 3))):
        first = draw.randint(0, 60)
        yield Step(first, first + draw.randint(0, 20), draw.uniform(1.05, 2.0), draw.random() < 0.3)


@pytest.mark.long
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_what_is_recommended_is_never_slower_than_the_default(part: int) -> None:
    worse, advice = [], Counter[str]()
    for seed in range(part, SEEDS, PARTS):
        found = analysis(seed)
        advice[found.recommendation.advice] += 1
        if found.recommendation.advice == "use":
            winner = found.recommendation.winner
            assert winner is not None
            noise = 2 * found.noise
            here, there = found.best(winner.result.candidate, noise), found.best(found.search.space.default)
            if here < (1 - noise) * there:
                worse.append((seed, here, there))
    assert not worse
    assert advice["use"] > 50 and advice["keep"] > 20, advice
