"""What becomes of the server when a candidate answers nothing; server and requests are fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conch.core.errors import internal
from conch.measure.analyze.options.settings import AnalyzeSettings, ModelSettings
from conch.measure.analyze.profiling import profile as profile_module
from conch.measure.analyze.profiling import profile as profiling
from conch.measure.analyze.profiling.profile import Profile
from conch.measure.analyze.results import Point, Trial
from conch.measure.analyze.saved_results import SearchOutcome
from conch.measure.analyze.search.space import merged
from conch.measure.perf.senders.channels.connecting import Address
from tests.unit.measure.analyze.configs import batching_model
from tests.unit.measure.analyze.points import point


class FakeServer:
    """Records its calls; the model hangs with two instances."""

    address = Address("127.0.0.1", 9)

    def __init__(self) -> None:
        self.told: list[str] = []
        self.instances = 1

    def load(self, overrides: Any) -> Any:
        config = merged(batching_model(), overrides.get("m", {}))
        self.instances = config["instance_group"][0]["count"]
        self.told.append(f"load {self.instances}")
        return {"m": config}

    def restart(self) -> None:
        self.told.append("restart")

    def check(self) -> None:
        pass

    def complaints(self) -> str:
        return ""

    def close(self) -> None:
        self.told.append("close")


class Watching:
    """Notes what is measured."""

    def __init__(self) -> None:
        self.measured_now: list[str] = []
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def measuring(self, *given: object) -> None: ...

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        if not before:
            self.measured_now.append(trial.candidate.name)

    def failed(self, *given: object, before: bool) -> None: ...


def profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, server: FakeServer, answer: Callable[[float], Point],
    watching: Watching | None = None, **more: Any,
) -> tuple[SearchOutcome, list[str]]:  # fmt: skip
    """A sweep over one to three instances, each measured by ``answer``; and the candidates that were measured."""

    class FakeMeasurement:
        def __init__(self, plans: Any, *, rate: bool) -> None:
            pass

        def measure(self, load: float, hopeless: Callable[[Sequence[Point]], bool] | None = None) -> Point:
            return answer(load)

        def close(self) -> None:
            server.told.append("no more requests")

    monkeypatch.setattr(profiling, "open_server", lambda *given: server)
    monkeypatch.setattr(profiling, "check_requests", lambda *given: None)
    monkeypatch.setattr(profile_module, "CandidateMeasurement", FakeMeasurement)
    settings = AnalyzeSettings(
        model_repository=folder, profile_models=(ModelSettings(name="m"),), run_config_search_mode="brute",
        run_config_search_max_instance_count=3, run_config_search_min_model_batch_size=8,
        run_config_search_max_model_batch_size=8, export_path=folder / "analysis",
        **{"concurrency": (4,), **more},
    )  # fmt: skip
    watching = watching or Watching()
    with Profile(settings, watching) as profile:
        [outcome] = profile.run()
    return outcome, watching.measured_now


def test_what_the_server_treats_the_same_is_measured_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = Watching()

    outcome, _ = profile(
        tmp_path, monkeypatch, FakeServer(), lambda load: point(100.0, load=load), watching,
        sweep=("instances", "delay"), concurrency=(1,),
    )  # fmt: skip

    assert len(outcome.results) == 3 * 4, "one caller fills no batch: no dynamic batching is as good as no delay"
    assert any("Skipped: 3 of 15 combinations" in line for line in watching.said)


def test_a_server_is_restarted_after_a_candidate_that_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()

    def answer(load: float) -> Point:
        if server.instances == 2:
            raise internal("model 'm' completed no request")
        return point(100.0 * server.instances, load=load)

    outcome, _ = profile(tmp_path, monkeypatch, server, answer)

    errors = [result.error for result in outcome.results]
    assert sum(bool(error) for error in errors) == 1 and len(errors) == 3
    failed = server.told.index("load 2")
    assert server.told[failed + 1 : failed + 3] == ["no more requests", "restart"]
    assert server.told.count("restart") == 2, "the candidate is tried twice"


def test_a_failure_that_passes_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    failures = ["model 'm' completed no request"]

    def answer(load: float) -> Point:
        if server.instances == 2 and failures:
            raise internal(failures.pop())
        return point(100.0 * server.instances, load=load)

    outcome, _ = profile(tmp_path, monkeypatch, server, answer)
    assert not any(result.error for result in outcome.results)


def test_a_failure_of_before_is_final_unless_it_is_to_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    broken = True

    def answer(load: float) -> Point:
        if broken and server.instances == 2:
            raise internal("model 'm' completed no request")
        return point(100.0 * server.instances, load=load)

    def errors(**more: Any) -> int:
        outcome, _ = profile(tmp_path, monkeypatch, server, answer, **more)
        return sum(bool(result.error) for result in outcome.results)

    assert errors() == 1
    broken = False
    assert errors() == 1
    assert errors(retry_failed=True) == 0


def test_a_search_whose_time_is_up_still_has_its_final_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    clock = [0.0]
    monkeypatch.setattr(profile_module.time, "monotonic", lambda: clock[0])

    def answer(load: float) -> Point:
        clock[0] += 10.0
        return point(100.0 * server.instances, load=load)

    outcome, _ = profile(tmp_path, monkeypatch, server, answer, budget=150.0)

    assert outcome.complete and outcome.final is not None and len(outcome.final.rounds) == 3
    assert len(outcome.results) == 2, "three instances were not tried"
    assert outcome.recommendation.advice == "use" and clock[0] <= 140.0


def test_the_best_and_the_default_are_measured_in_turns_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    speed = [100.0]

    def answer(load: float) -> Point:
        speed[0] *= 0.9  # a machine that becomes slower all the time
        return point(speed[0] * server.instances, load=load)

    outcome, measured = profile(tmp_path, monkeypatch, server, answer)

    found = outcome.recommendation
    assert found.winner is not None and found.comparison is not None and found.comparison.interval is not None
    default, best = "m_config_default", found.winner.name
    assert measured[-6:] == [best, default, default, best, best, default]
    instances = found.winner.result.candidate.overrides["m"]["instance_group"][0]["count"]
    assert instances in found.comparison.interval and found.advice == "use"

    again, measured = profile(tmp_path, monkeypatch, server, answer)
    assert measured == [] and again.final == outcome.final and again.results == outcome.results


def test_a_default_that_is_the_best_is_not_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    outcome, measured = profile(tmp_path, monkeypatch, server, lambda load: point(100.0 / server.instances, load=load))
    assert outcome.final is None and len(measured) == 3
    assert outcome.recommendation.advice == "keep"


def test_rounds_that_fail_leave_the_search_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    asked = [0]

    def answer(load: float) -> Point:
        asked[0] += 1
        if asked[0] > 7:
            raise internal("model 'm' completed no request")
        return point(100.0 * server.instances, load=load)

    outcome, _ = profile(tmp_path, monkeypatch, server, answer)
    assert outcome.complete and not any(result.error for result in outcome.results)
    assert outcome.final is not None and len(outcome.final.rounds) == 1
    assert outcome.recommendation.advice == "unproven"
