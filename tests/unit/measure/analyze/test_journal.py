"""What a journal keeps, and when it counts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import Code, ConchError
from conch.measure.analyze.journal import FILENAME, Journal
from conch.measure.analyze.results import Candidate, ModelFigures, Point
from conch.measure.perf.server.resources import GpuFigures, ResourceFigures

NOW = {"machine": "fast", "conch": "1", "measuring": "{}", "model a": "A", "model b": "B"}
FIRST = Candidate("a_config_0", {"a": {"max_batch_size": 4}})
POINT = Point(
    8.0,
    {"a": ModelFigures(10.0, 0.1, {50: 0.1, 99.0: 0.2}, 0.0, 0.1, {"queue": 0.01}, 100, 1)},
    ResourceFigures(1.5, 1 << 30, {"GPU-1": GpuFigures(0.5, 1 << 20, 30.0)}),
    disturbed=True,
    warnings=("told",),
)


def test_a_point_is_there_at_the_next_start(tmp_path: Path) -> None:
    with Journal(tmp_path, NOW) as journal:
        journal.loaded(["a"], FIRST, {"a": {"max_batch_size": 4}})
        journal.add(["a"], FIRST, POINT)
        journal.fail(["a"], Candidate("a_config_1", {"a": {"max_batch_size": 8}}), "too large")

    with Journal(tmp_path, NOW) as again:
        assert again.points(["a"], FIRST, 8) == [POINT]
        assert not again.points(["a"], FIRST, 16)
        assert not again.points(["a"], FIRST, 8, finalist=FIRST), "final rounds are measured one after the other"
        assert again.configs(["a"], FIRST) == {"a": {"max_batch_size": 4}}
        assert again.failure(["a"], Candidate("another name", {"a": {"max_batch_size": 8}})) == "too large"
        assert again.changes == ()


def test_a_change_concerns_only_what_it_was_measured_with(tmp_path: Path) -> None:
    of_b = Candidate("b_config_default")
    with Journal(tmp_path, NOW) as journal:
        journal.add(["a"], FIRST, POINT)
        journal.add(["b"], of_b, POINT)

    with Journal(tmp_path, {**NOW, "model a": "new"}) as changed:
        assert changed.changes == ("model a has changed: its measurements are repeated",)
        assert not changed.points(["a"], FIRST, 8)
        assert changed.points(["b"], of_b, 8) == [POINT]
    with Journal(tmp_path, {**NOW, "machine": "slow"}) as elsewhere:
        assert any("the machine has changed from fast to slow" in change for change in elsewhere.changes)
        assert not elsewhere.points(["b"], of_b, 8)
    with Journal(tmp_path, {**NOW, "machine": "slow", "measuring": '{"p": 1}'}) as differently:
        assert differently.changes == ("the measurement settings have changed (p): all measurements are repeated",)
    with Journal(tmp_path, NOW) as back:
        assert back.points(["a"], FIRST, 8) == [POINT]


def test_a_line_that_was_being_written_is_dropped(tmp_path: Path) -> None:
    with Journal(tmp_path, NOW) as journal:
        journal.add(["a"], FIRST, POINT)
    with (tmp_path / FILENAME).open("a") as file:
        file.write('{"under":"x","candi')

    with Journal(tmp_path, NOW) as again:
        again.add(["a"], FIRST, POINT)
    with Journal(tmp_path, NOW) as third:
        assert third.points(["a"], FIRST, 8) == [POINT, POINT], "the second measurement of the same is kept as well"


@pytest.mark.parametrize("line", ["hello", "[]", '{"format":99,"conditions":{}}', '{"under":"x","point":{}}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / FILENAME).write_text(line + "\n")

    with pytest.raises(ConchError, match="line 1, is not a journal of this version") as caught:
        Journal(tmp_path, NOW)
    assert caught.value.code is Code.INVALID_ARG
    assert (tmp_path / FILENAME).read_text() == line + "\n"


def test_two_analyses_do_not_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path, NOW), pytest.raises(ConchError, match="in use by another analysis"):
        Journal(tmp_path, NOW)
