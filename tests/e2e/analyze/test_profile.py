"""An analysis from settings to a ranking, over a model that fails under some configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.measure.analyze.applying import BEFORE, apply, changes
from conch.measure.analyze.journal import FILENAME
from conch.measure.analyze.judging.goals import Constraint
from conch.measure.analyze.options.settings import AnalyzeSettings, ModelSettings
from conch.measure.analyze.profiling.profile import Profile
from conch.measure.analyze.profiling.progress import SearchProgress
from conch.measure.analyze.results import Point, Trial
from conch.measure.analyze.saved_results import SearchOutcome
from conch.measure.analyze.servers import ServerLost
from conch.repository.scan import ModelRepository
from tests.e2e.analyze import models
from tests.servers import ConchServer


@dataclass
class Watching:
    """Records its calls, and ends the analysis by Ctrl+C after ``most`` measurements."""

    most: int = 1000
    measured_now: list[tuple[str, float]] = field(default_factory=list)
    from_before: list[tuple[str, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.said.append(line)

    def measuring(self, trial: Trial, progress: SearchProgress) -> None:
        if len(self.measured_now) == self.most:
            raise KeyboardInterrupt

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        (self.from_before if before else self.measured_now).append((trial.candidate.name, trial.load))

    def failed(self, trial: Trial, error: str, *, before: bool) -> None:
        self.said.append(error)


@pytest.fixture
def settings(tmp_path: Path) -> AnalyzeSettings:
    return AnalyzeSettings(
        model_repository=models.write(tmp_path / "models"),
        profile_models=(ModelSettings(name="waits"),),
        run_config_search_mode="brute",
        run_config_search_max_instance_count=2,
        run_config_search_min_model_batch_size=2,
        run_config_search_max_model_batch_size=8,
        concurrency=(4,),
        export_path=tmp_path / "analysis",
        perf_analyzer_flags={"measurement-interval": 300, "max-trials": 3, "stability-percentage": 99, "warm-up": 0.1},
        final_rounds=0,
    )


def run(settings: AnalyzeSettings, watching: Watching) -> Sequence[SearchOutcome]:
    with Profile(settings, watching) as profile:
        return profile.run()


@pytest.mark.slow
def test_candidates_that_fail_are_results_and_the_others_are_ranked(settings: AnalyzeSettings) -> None:
    kept = settings.export_path / "kept"

    [outcome] = run(replace(settings, output_model_repository_path=kept, final_rounds=1), Watching())

    errors = {
        (result.candidate.overrides.get("waits") or {}).get("max_batch_size"): result.error
        for result in outcome.results
    }
    assert "died with status 3" in errors[4]
    assert "8 does not fit" in errors[8]
    # Of its points, as others who use the machine may have disturbed some.
    best = max(outcome.results, key=lambda one: max((point.throughput for point in one.points), default=0.0))
    assert best.configs["waits"]["instance_group"][0]["count"] == 2
    winner = outcome.recommendation.winner
    assert winner is not None and winner.result.points
    if not winner.result.candidate.is_default:
        assert outcome.final is not None and outcome.final.name == winner.name
    assert (kept / best.candidate.name / "waits" / "config.pbtxt").read_text().startswith("# What people wrote")


def test_an_interrupted_analysis_continues_where_it_was(settings: AnalyzeSettings) -> None:
    settings = replace(settings, run_config_search_max_model_batch_size=2)
    first, second = Watching(most=1), Watching()
    with Profile(settings, first) as profile:
        with pytest.raises(KeyboardInterrupt):
            profile.run()
        [partial] = profile.outcomes
    assert not partial.complete
    assert [bool(result.points) for result in partial.results] == [True], "what was only begun is no result"

    [outcome] = run(settings, second)

    assert outcome.complete
    assert second.from_before == first.measured_now
    assert not {*second.measured_now} & {*first.measured_now}
    third = Watching()
    [again] = run(settings, third)
    assert third.measured_now == []
    assert again.results == outcome.results


def test_models_at_the_same_time_and_an_ensemble_follows_its_members(settings: AnalyzeSettings) -> None:
    both = replace(
        settings,
        profile_models=(ModelSettings(name="both"), ModelSettings(name="waits")),
        run_config_profile_models_concurrently_enable=True,
        run_config_search_max_instance_count=1,
        run_config_search_min_model_batch_size=1,
        run_config_search_max_model_batch_size=2,
        client_protocol="http",
    )

    [outcome] = run(both, Watching())

    smaller = next(result for result in outcome.results if result.candidate.overrides)
    assert smaller.error == ""
    assert [smaller.configs[name]["max_batch_size"] for name in ("waits", "both")] == [1, 1]
    assert all(figures.requests for figures in smaller.points[0].models.values())


def test_a_model_that_needs_data_is_reported_before_anything_is_measured(settings: AnalyzeSettings) -> None:
    file = ModelRepository([settings.model_repository or Path()]).directory("waits") / "config.pbtxt"
    file.write_text(file.read_text().replace("dims: [ 4 ]", "dims: [ -1 ]"))
    watching = Watching()

    with pytest.raises(ConchError, match="--shape"):
        run(settings, watching)
    assert watching.measured_now == []


def test_the_winner_is_applied_once_beside_what_was_there(settings: AnalyzeSettings) -> None:
    repository = ModelRepository([settings.model_repository or Path()])
    file = repository.directory("waits") / "config.pbtxt"
    overrides = {"waits": {"instance_group": [{"count": 2}]}}

    [change] = changes(repository, overrides)
    [old] = apply(repository, [change])

    assert change.diff.count("\n+") == 2 and "count: 2" in change.diff
    assert old == file.with_name(file.name + BEFORE)
    assert old.read_text() == models.CONFIG
    assert "count: 2" in file.read_text() and file.read_text().startswith("# What people wrote stays.")
    assert changes(repository, overrides) == []


def test_what_does_not_load_is_not_applied(settings: AnalyzeSettings) -> None:
    repository = ModelRepository([settings.model_repository or Path()])

    with pytest.raises(ConchError, match=r"nothing is applied: (?s:.)*8 does not fit"):
        apply(repository, changes(repository, {"waits": {"max_batch_size": 8}}))

    folder = repository.directory("waits")
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["1", "config.pbtxt"]
    assert (folder / "config.pbtxt").read_text() == models.CONFIG


def test_nothing_is_recommended_where_no_candidate_keeps_the_constraints(settings: AnalyzeSettings) -> None:
    impossible = replace(
        settings,
        constraints=(Constraint("latency_p99", maximum=1e-6),),
        run_config_search_max_instance_count=1,
        run_config_search_max_model_batch_size=2,
    )

    [outcome] = run(impossible, Watching())

    assert outcome.recommendation.advice == "none"


class Ending(Watching):
    """Ends the server after the first measurement."""

    server: ConchServer

    def measured(self, trial: Trial, point: Point, *, before: bool) -> None:
        super().measured(trial, point, before=before)
        assert self.server.process is not None
        self.server.process.kill()
        self.server.process.wait()


def test_a_running_server_that_dies_ends_the_analysis_and_makes_no_candidate_a_failure(
    settings: AnalyzeSettings,
) -> None:
    remote = replace(
        settings, triton_launch_mode="remote", perf_analyzer_timeout=2.0, run_config_search_max_model_batch_size=2
    )
    flags = ("--model-control-mode=explicit", "--load-model=waits")
    watching = Ending()
    assert settings.model_repository is not None
    with ConchServer(settings.model_repository, *flags) as watching.server:
        there = replace(remote, triton_grpc_endpoint=watching.server.grpc)
        with (
            pytest.raises(ConchError, match="could not restore its original models"),
            Profile(there, watching) as profile,
        ):
            with pytest.raises(ServerLost, match="no server responds"):
                profile.run()

    [outcome] = profile.outcomes
    assert [bool(result.points) for result in outcome.results] == [True]
    assert '"error"' not in (settings.checkpoints / FILENAME).read_text()


def test_a_figure_that_cannot_be_measured_is_reported_after_the_first_measurement(settings: AnalyzeSettings) -> None:
    wanted = replace(settings, constraints=(Constraint("gpu_power", maximum=100.0),))
    watching = Watching()

    with pytest.raises(ConchError, match="gpu power of the server cannot be measured from this machine"):
        run(wanted, watching)
    assert len(watching.measured_now) == 1
