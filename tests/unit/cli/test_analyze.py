"""``conch analyze``: its help, what it refuses before it measures, and its reports from what was saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conch.cli import main
from conch.measure.analyze.judging.goals import Constraint
from conch.measure.analyze.judging.ranking import FinalRound, FinalRounds
from conch.measure.analyze.options.settings import OPTIONS
from conch.measure.analyze.saved_results import Circumstances, SearchOutcome, load, save
from tests.unit.measure.analyze.points import goals, point, result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An analysis of a default and of two others, of which the faster is slower to answer."""
    found = [
        result("m_config_default", point(100, p99=0.02)),
        result("m_config_0", point(200, p99=0.03, load=16), point(190, p99=0.02), instances=2),
        result("m_config_1", point(400, p99=0.2, load=64), instances=3),
    ]
    one = FinalRound(point(390, p99=0.2, load=64), (point(100),))
    final = FinalRounds("m_config_1", (one, one))
    save(tmp_path, Circumstances(batch_sizes={"m": 1}), [SearchOutcome(["m"], goals(), found, final=final)])
    return tmp_path


def best(folder: Path) -> str | None:
    """The best one of the report that was written last."""
    last = max(folder.rglob("analysis.json"), key=lambda file: file.stat().st_mtime_ns)
    found: str | None = json.loads(last.read_text())["best"]
    return found


def test_what_was_saved_is_read_as_it_was(folder: Path) -> None:
    circumstances, (search,) = load(folder)
    save(folder / "again", circumstances, [search])
    assert load(folder / "again") == (circumstances, [search])


def test_a_report_needs_no_measurement(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "report", "-e", str(folder), "-o", "csv,json"]) == 0
    assert best(folder) == "m_config_1"
    assert "m_config_1" in (folder / "metrics-model-inference.csv").read_text()
    shown = " ".join(capsys.readouterr().out.split())
    assert "m_config_1 is the best of 3 configurations" in shown
    assert "In the final rounds m_config_1 has 3.90 times the throughput of the default" in shown


def test_other_goals_give_another_winner(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["analyze", "report", "-e", str(folder), "-o", "json"]
    assert main([*command, "--constraint", "p99<50ms"]) == 0
    assert best(folder) == "m_config_0"
    assert main([*command, "--latency-budget", "25", "--objective", "throughput"]) == 0
    shown = capsys.readouterr().out
    assert "190 infer/s" in shown and "In the final rounds" not in shown, "turns were those of another configuration"
    assert load(folder)[1][0].goals == goals(), "the goals of the run are kept"


def test_a_report_under_other_goals_leaves_that_of_the_run_as_it_is(folder: Path) -> None:
    assert main(["analyze", "report", "-e", str(folder), "-o", "json"]) == 0
    before = (folder / "analysis.json").read_bytes()

    assert main(["analyze", "report", "-e", str(folder), "-o", "json", "--constraint", "p99<50ms"]) == 0

    assert (folder / "analysis.json").read_bytes() == before
    [other] = folder.glob("goals-*/analysis.json")
    assert "p99-latency-at-most-50" in other.parent.name
    assert json.loads(other.read_text())["advice"] == "unproven", "these goals have had no final rounds"


def test_goals_that_nothing_keeps_are_an_error_that_names_the_nearest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", "report", "-e", str(folder), "-o", "json", "--constraint", "throughput>500"]) == 1
    assert "The closest is m_config_1: throughput is 400 infer/s and must be at least 500" in capsys.readouterr().out


def test_an_interrupted_search_is_reported_as_interrupted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    circumstances, (search,) = load(folder)
    save(folder, circumstances, [SearchOutcome(search.models, search.goals, search.results, complete=False)])
    main(["analyze", "report", "-e", str(folder), "-o", "json"])
    assert "The search was interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "-e", "nowhere"], "nowhere/results.json does not exist: run 'conch analyze profile' first"),
        (["profile"], "profile_models: name the models to measure"),
        (["profile", "--profile-models", "a", "-m", "."], "profile_models: there is no model 'a'"),
        (["profile", "--profile-models", "a", "--mode", "docker"], "--mode: conch does not start containers"),
        (["profile", "--profile-models", "a", "--constraint", "p99<1"], "'p99<1' has no unit"),
        (["profile", "--gpus", "GPU-1"], "--gpus: choose GPUs for the server by CUDA_VISIBLE_DEVICES"),
        (
            ["profile", "--profile-models", "a", "--output-model-repository-path", ".."],
            ".. is not empty; overwrite it with --override-output-model-repository",
        ),
        (["profile", "--profile-model", "a"], "did you mean '--profile-models'?"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_with_something_else_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{}", "[", json.dumps({"format": 99})):
        (folder / "results.json").write_text(text)
        assert main(["analyze", "report", "-e", str(folder)]) == 1
        assert "results.json" in capsys.readouterr().err


def test_applying_needs_a_repository(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "apply", "-e", str(folder)]) == 1
    assert "there is no local repository to write to" in capsys.readouterr().err
    main(["analyze", "report", "-e", str(folder), "-o", "json"])
    assert "To use it" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("final", "complete", "reason"),
    [
        (80, True, "in the final rounds the default was better than m_config_1"),
        (100, True, "in the final rounds m_config_1 was not better than the default by more than the noise"),
        (None, True, "m_config_1 was not compared with the default"),
        (390, False, "the search was interrupted"),
    ],
)
def test_what_is_not_proven_to_be_better_is_shown_and_not_applied(
    final: float | None, complete: bool, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    circumstances, (search,) = load(folder)
    config = folder / "models" / "m" / "config.pbtxt"
    config.parent.mkdir(parents=True)
    config.write_text('backend: "python"\ninstance_group [{ count: 1 }]\n')
    one = FinalRound(point(final or 1, p99=0.2, load=64), (point(100),))
    rounds = FinalRounds("m_config_1", (one, one)) if final else None
    found = replace(search, final=rounds, complete=complete)
    save(folder, replace(circumstances, repository=str(config.parent.parent)), [found])

    assert main(["analyze", "apply", "-e", str(folder)]) == 1

    shown = capsys.readouterr()
    assert f"nothing is applied: {reason}" in shown.err and "--force" in shown.err
    assert "+instance_group [{ count: 3 }]" in shown.out
    assert "count: 1" in config.read_text()


def test_a_file_that_cannot_be_written_costs_no_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "metrics-model-inference.csv").mkdir()
    assert main(["analyze", "report", "-e", str(folder), "-o", "csv,json"]) == 0
    shown = capsys.readouterr()
    assert "metrics-model-inference.csv is not written" in shown.err
    assert "is the best of 3 configurations" in shown.out and best(folder) == "m_config_1"


def test_an_analysis_that_continues_finds_its_own_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept" / "m_config_default").mkdir(parents=True)
    command = ["analyze", "profile", "-m", ".", "--profile-models", "m", "--output-model-repository-path", "kept"]
    assert main(command) == 1
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "analysis" / "checkpoints").mkdir(parents=True)
    (tmp_path / "analysis" / "checkpoints" / "checkpoint.jsonl").touch()
    assert main([*command, "--mode", "remote", "--triton-grpc-endpoint", "localhost:1"]) == 1
    assert "is not empty" not in capsys.readouterr().err
    (tmp_path / "kept" / "mine").mkdir()
    assert main(command) == 1
    assert "is not empty" in capsys.readouterr().err


def test_every_option_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["analyze", "profile", "--help-all"])
    shown = capsys.readouterr().out
    assert [option.flag for option in OPTIONS.values() if option.flag not in shown] == []


def test_constraints_of_the_run_hold_where_only_the_objective_is_given(folder: Path) -> None:
    circumstances, (search,) = load(folder)
    bounded = goals(constraints=[Constraint("latency_p99", maximum=0.05)])
    save(folder, circumstances, [SearchOutcome(search.models, bounded, search.results)])
    main(["analyze", "report", "-e", str(folder), "-o", "json", "--objective", "throughput=2"])
    assert best(folder) == "m_config_0"
