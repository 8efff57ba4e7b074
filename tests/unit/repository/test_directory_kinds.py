"""A directory that is not a model repository is reported, with a directory to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.repository.directory_kinds import repository_problem
from conch.repository.scan import ModelRepository


def put(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_checkpoint_is_no_repository(tmp_path: Path) -> None:
    put(tmp_path / "config.json", tmp_path / "1_Pooling" / "config.json")
    with pytest.raises(ConchError, match=r"is a checkpoint, not a repository of models \(serve it with 'conch serve /"):
        ModelRepository([tmp_path])


def test_a_folder_with_a_file_of_weights_is_a_checkpoint(tmp_path: Path) -> None:
    put(tmp_path / "model.gguf")
    problem = repository_problem(tmp_path)
    assert problem is not None and problem.hint == f"serve it with 'conch serve {tmp_path}'"


def test_a_model_is_no_repository(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    problem = repository_problem(tmp_path / "m")
    assert problem is not None and problem.hint == f"give {tmp_path}"


@pytest.mark.parametrize("file", ["m/1/model.py", "m/1/model.json", "m/config.pbtxt"])
def test_a_version_of_a_model_is_no_repository(file: str, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    put(tmp_path / file)
    problem = repository_problem(tmp_path / "m" / "1")
    assert problem is not None and problem.hint == f"give {tmp_path}"


def test_what_to_give_is_named_from_within_a_model_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "m" / "1" / "model.py")
    hints = []
    for directory, given in (
        (tmp_path, "m/1"),
        (tmp_path / "m", "."),
        (tmp_path / "m", "1"),
        (tmp_path / "m" / "1", "."),
    ):
        monkeypatch.chdir(directory)
        problem = repository_problem(Path(given))
        assert problem is not None
        hints.append(problem.hint)
    assert hints == ["give .", *[f"give {tmp_path}"] * 3]


def test_a_repository_may_have_a_number_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert repository_problem(tmp_path / "1") is None


def test_a_misspelt_directory_is_reported_with_a_similar_one(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    problem = repository_problem(tmp_path / "model")
    assert problem is not None and problem.hint == f"did you mean '{tmp_path / 'models'}'?"


def test_a_repository_may_hold_other_files_and_nothing_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    put(tmp_path / "full" / "config.json", tmp_path / "full" / "m" / "1" / "model.py")
    assert repository_problem(tmp_path / "empty") is None
    assert repository_problem(tmp_path / "full") is None


def test_path_made_of_a_url_is_reported_as_one() -> None:
    problem = repository_problem(Path("s3://bucket/models"))
    assert problem is not None and (problem.hint, "s3://" in problem.message) == ("copy it to a directory", True)
