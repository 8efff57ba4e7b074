"""Search strategies on simulated servers: they end, measure nothing twice, and find what the full sweep finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.measure.analyze.judging.objectives import excess, score
from conch.measure.analyze.options import goal_texts
from conch.measure.analyze.options.settings import AnalyzeSettings, SearchMode, models
from conch.measure.analyze.results import Candidate
from conch.measure.analyze.search.searches import Search, searches
from conch.measure.analyze.search.space import ModelFacts
from conch.measure.analyze.search.strategies import strategy_of
from tests.unit.measure.analyze.configs import batching_model
from tests.unit.measure.analyze.simulated import SHAPES, RateServer, SimulatedServer

NARROW = ("instances", "batch")
GOALS: Mapping[str, tuple[list[str], list[str]]] = {
    "most throughput": (["throughput"], []),
    "throughput with bounds": (["throughput"], ["p99<30ms", "memory<1GB"]),
    "cost with a bound": (["cost"], ["p99<50ms"]),
    "both": (["throughput", "latency:p99"], []),
}


@dataclass(frozen=True)
class Outcome:
    """What a search found: the candidate and load of the best point, and how many measurements it took."""

    search: Search
    server: SimulatedServer
    best: tuple[Candidate, float]
    measurements: int

    def quality(self, noise: float = 0.1) -> float:
        """The score without noise beside the default at one caller; 0 where a bound is broken by more than noise."""
        reference = self.server.exact(self.search.space.default, 1)
        point = self.server.exact(*self.best)
        return score(point, reference, self.search.goals) if excess(point, self.search.goals) < noise else 0.0


def options(mode: SearchMode, goal: str, sweep: Sequence[str] = NARROW, **more: object) -> AnalyzeSettings:
    objectives, constraints = GOALS[goal]
    return AnalyzeSettings(
        run_config_search_mode=mode,
        sweep=tuple(sweep),
        profile_models=models("profile_models", "m"),
        objectives=goal_texts.objectives("objectives", objectives),
        constraints=goal_texts.constraints("constraints", constraints),
        **{"final_rounds": 0, **more},  # type: ignore[arg-type]
    )


def run(
    chosen: AnalyzeSettings, shape: str, seed: int, noise: float = 0.02, kind: type[SimulatedServer] = SimulatedServer
) -> Outcome:
    config = batching_model()
    (search,) = searches(chosen, {"m": ModelFacts("m", config, threads=4)})
    server = kind(SHAPES[shape], config, noise=noise, seed=seed)
    strategy = strategy_of(chosen, search)
    while (trial := strategy.next()) is not None:
        strategy.add(trial, server.measure(trial.candidate, trial.load))
    found = [(result.candidate, point) for result in strategy.results for point in result.points]
    reference = found[0][1]
    candidate, best = max(
        found,
        key=lambda one: (-excess(one[1], search.goals), score(one[1], reference, search.goals)),
    )
    assert strategy.expected == len(server.measured)
    assert max(Counter(server.measured).values()) <= 3, "measured again and again"
    return Outcome(search, server, (candidate, best.load), len(server.measured))


@cache
def swept(shape: str, goal: str) -> Outcome:
    """The full sweep, without noise."""
    return run(options("brute", goal), shape, 0, noise=0.0)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("shape", SHAPES)
def test_hill_climbing_finds_what_the_full_sweep_finds_in_a_fraction_of_its_measurements(shape: str, goal: str) -> None:
    full = swept(shape, goal)
    found = [run(options("quick", goal), shape, seed) for seed in range(20)]
    near = [one for one in found if one.quality() >= 0.95 * full.quality()]
    cheap = [one for one in found if one.measurements <= full.measurements / 3]
    assert len(near) >= 18
    assert len(cheap) == 20
    # Where latency is an objective, each candidate's load is searched in both directions.
    most = 4 if goal == "both" else 7
    assert sorted(one.measurements for one in found)[10] <= full.measurements / most


@pytest.mark.extras
@pytest.mark.parametrize("goal", ["most throughput", "throughput with bounds"])
@pytest.mark.parametrize("shape", SHAPES)
def test_optuna_finds_what_the_full_sweep_finds_in_a_third_of_its_measurements(shape: str, goal: str) -> None:
    full = swept(shape, goal)
    found = [run(options("optuna", goal), shape, seed) for seed in range(10)]
    assert sum(one.quality() >= 0.95 * full.quality() for one in found) >= 9
    assert all(one.measurements <= full.measurements / 3 for one in found)


@pytest.mark.parametrize("goal", ["most throughput", "throughput with bounds"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rates_rise_until_the_server_cannot_follow_or_breaks_a_bound(shape: str, goal: str) -> None:
    rates = {"request_rate_search_enable": True, "run_config_search_max_request_rate": 1e6}
    full = run(options("brute", goal, **rates), shape, 0, noise=0.0, kind=RateServer)
    found = [run(options("quick", goal, **rates), shape, seed, kind=RateServer) for seed in range(20)]
    # Near what a server can do, 2 % more capacity is half the latency, so bounds are loose.
    assert sum(one.quality(noise=0.5) >= 0.93 * full.quality() for one in found) >= 18
    assert all(one.quality(noise=0.5) >= 0.9 * full.quality() for one in found)
    assert all(one.measurements <= full.measurements / 6 for one in found)


@pytest.mark.extras
@pytest.mark.parametrize("mode", ["brute", "quick", "optuna"])
def test_a_search_that_is_told_the_same_asks_the_same(mode: SearchMode) -> None:
    chosen = options(mode, "throughput with bounds", run_config_search_max_instance_count=2)
    assert run(chosen, "padded", 3).server.measured == run(chosen, "padded", 3).server.measured


@pytest.mark.parametrize("mode", ["brute", "quick"])
def test_the_default_is_measured_first(mode: SearchMode) -> None:
    assert run(options(mode, "most throughput"), "padded", 0).server.measured[0][0] == "m_config_default"


def test_a_candidate_that_cannot_be_served_is_left_out_and_the_search_continues() -> None:
    chosen = options("quick", "most throughput", ["instances"])
    (search,) = searches(chosen, {"m": ModelFacts("m", batching_model())})
    server = SimulatedServer(SHAPES["memory-bound"], batching_model())
    strategy = strategy_of(chosen, search)
    failed = []
    while (trial := strategy.next()) is not None:
        if trial.candidate.overrides:
            failed.append(trial.candidate.name)
            strategy.add(trial, None)
        else:
            strategy.add(trial, server.measure(trial.candidate, trial.load))
    assert len(failed) == len(set(failed)) == 4


@pytest.mark.parametrize("mode", ["brute", "quick"])
@settings(max_examples=25)
@given(
    instances=st.integers(1, 4),
    batch=st.integers(1, 32),
    least=st.integers(1, 8),
    most=st.integers(8, 100),
    loads=st.lists(st.integers(1, 64), max_size=4, unique=True).map(sorted),
    seed=st.integers(0, 99),
    goal=st.sampled_from(sorted(GOALS)),
)
def test_every_search_ends_within_its_bounds(
    mode: SearchMode, instances: int, batch: int, least: int, most: int, loads: list[int], seed: int, goal: str
) -> None:
    chosen = options(
        mode, goal, ["instances", "batch", "delay"],
        run_config_search_max_instance_count=instances, run_config_search_max_model_batch_size=batch,
        run_config_search_min_concurrency=least, run_config_search_max_concurrency=most, concurrency=tuple(loads),
    )  # fmt: skip
    outcome = run(chosen, "padded", seed, noise=0.2)
    asked = {load for _, load in outcome.server.measured}
    assert asked <= set(loads) if loads else all(least <= load <= most for load in asked)
    if mode == "brute" and loads:
        assert len({*outcome.server.measured}) % len(loads) == 0


@pytest.mark.parametrize("mode", ["brute", "quick"])
@pytest.mark.parametrize("shape", SHAPES)
def test_how_many_measurements_are_expected_is_near_what_it_takes(shape: str, mode: SearchMode) -> None:
    chosen = options(mode, "most throughput", final_rounds=3)
    (search,) = searches(chosen, {"m": ModelFacts("m", batching_model(), threads=4)})
    server = SimulatedServer(SHAPES[shape], batching_model())
    strategy = strategy_of(chosen, search)
    expected = []
    while (trial := strategy.next()) is not None:
        expected.append(strategy.expected)
        strategy.add(trial, server.measure(trial.candidate, trial.load))
    taken = len(expected)
    assert all(0.4 * taken <= one <= 1.6 * taken for one in expected)


def test_candidates_are_numbered_as_they_are_tried() -> None:
    names = list(
        dict.fromkeys(name for name, _ in run(options("quick", "most throughput"), "padded", 0).server.measured)
    )
    assert names == ["m_config_default", *(f"m_config_{number}" for number in range(len(names) - 1))]
