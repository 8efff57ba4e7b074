"""A budget is kept, and what is recommended at its end is verified: analyses of simulated servers, by a clock of their
own."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conch.measure.analyze.judging.goals import Constraint
from conch.measure.analyze.options.settings import AnalyzeSettings, models
from conch.measure.analyze.profiling import profile as profile_module
from conch.measure.analyze.profiling import profile as profiling
from conch.measure.analyze.profiling.profile import Profile
from conch.measure.analyze.results import Candidate, Point
from conch.measure.analyze.search.space import key, merged
from conch.measure.perf.senders.channels.connecting import Address
from tests.unit.measure.analyze.configs import batching_model
from tests.unit.measure.analyze.simulated import SharedServer, drawn_shape

SEEDS = 25


class Clock:
    """Seconds that pass when something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class TimedServer:
    """Loads candidates of a simulated server; loading and measuring take time by ``clock``."""

    address = Address("127.0.0.1", 9)

    def __init__(self, clock: Clock, draw: random.Random, loading: float, slow_from: float) -> None:
        self.clock, self.loading = clock, loading
        self._draw, self._slow_from = draw, slow_from
        self._simulated = SharedServer(drawn_shape(draw), batching_model(), [], noise=0.01, seed=draw.randrange(1000))
        self._loaded = Candidate("")

    def take(self, seconds: float) -> None:
        slower = 1.3 if self.clock.now >= self._slow_from else 1.0
        self.clock.now += seconds * self._draw.uniform(0.85, 1.15) * slower

    def load(self, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        self.take(self.loading)
        self._loaded = Candidate(key(overrides), overrides)
        return {"m": merged(batching_model(), overrides.get("m", {}))}

    def measure(self, load: float) -> Point:
        self.take(self._draw.choice((3.0, 3.0, 3.0, 5.0)))  # windows do not always agree at once
        return self._simulated.measure(self._loaded, load)

    def restart(self) -> None: ...

    def check(self) -> None: ...

    def complaints(self) -> str:
        return ""

    def close(self) -> None: ...


class Silent:
    """An observer that notes nothing."""

    def say(self, line: str) -> None: ...

    def measuring(self, *given: object) -> None: ...

    def measured(self, *given: object, before: bool) -> None: ...

    def failed(self, *given: object, before: bool) -> None: ...


@pytest.mark.parametrize(
    "budget", [60.0, pytest.param(180.0, marks=pytest.mark.long), pytest.param(600.0, marks=pytest.mark.slow)]
)
def test_an_analysis_ends_within_its_budget_with_a_verified_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    advice: Counter[str] = Counter()
    for seed in range(SEEDS):
        draw, clock = random.Random(seed), Clock()
        loading, slow_from = draw.choice((0.5, 2.0, 5.0)), draw.uniform(0, 2 * budget)
        server = TimedServer(clock, draw, loading, slow_from)

        class Measurement:
            def __init__(self, plans: object, *, rate: bool) -> None: ...

            def measure(self, load: float, hopeless: object = None, server: TimedServer = server) -> Point:
                return server.measure(load)

            def close(self) -> None: ...

        monkeypatch.setattr(profiling, "open_server", lambda *given, server=server: server)
        monkeypatch.setattr(profiling, "check_requests", lambda *given: None)
        monkeypatch.setattr(profile_module, "CandidateMeasurement", Measurement)
        monkeypatch.setattr(time, "monotonic", clock.monotonic)
        bounds = (Constraint("latency_p99", maximum=draw.uniform(0.02, 0.2)),) if draw.random() < 0.5 else ()
        settings = AnalyzeSettings(
            model_repository=tmp_path, profile_models=models("profile_models", "m"), constraints=bounds,
            sweep=("instances", "batch", "delay"), budget=budget, export_path=tmp_path / f"{budget}-{seed}",
        )  # fmt: skip
        with Profile(settings, Silent()) as profile:
            [outcome] = profile.run()
        advice[outcome.recommendation.advice] += 1
        assert clock.now <= budget - min(10, budget / 5), "with time for the reports"
    assert advice["unproven"] <= 0.05 * SEEDS, advice
    assert advice["use"] > 0.2 * SEEDS or budget < 100, advice
