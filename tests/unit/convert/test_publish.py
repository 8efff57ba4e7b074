"""Model directories appear whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conch.convert.publish import publish, require_free, workspace
from conch.errors import Code, ConchError


def make(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)


def names(repository: Path) -> list[str]:
    return sorted(path.name for path in repository.iterdir())


def test_model_is_moved_into_place(tmp_path: Path) -> None:
    repository = tmp_path / "new" / "models"
    with workspace(repository) as work:
        assert all(name.startswith(".") for name in names(repository))
        make(work / "made" / "m", "one")
        publish(work / "made", work, repository, ["m"], overwrite=False)

    assert names(repository) == ["m"]
    assert (repository / "m" / "config.pbtxt").read_text() == "one"


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), workspace(tmp_path) as work:
        make(work / "made" / "m", "one")
        raise RuntimeError

    assert names(tmp_path) == []


def test_existing_model_is_not_replaced_unasked(tmp_path: Path) -> None:
    make(tmp_path / "m", "old")

    with pytest.raises(ConchError, match=r"is there already: .*--overwrite") as raised:
        require_free(tmp_path, ["a", "m"], overwrite=False)

    assert raised.value.code is Code.ALREADY_EXISTS
    require_free(tmp_path, ["a", "m"], overwrite=True)


def test_existing_model_is_replaced_when_asked(tmp_path: Path) -> None:
    make(tmp_path / "m", "old")
    with workspace(tmp_path) as work:
        make(work / "made" / "m", "new")
        publish(work / "made", work, tmp_path, ["m"], overwrite=True)

    assert names(tmp_path) == ["m"]
    assert (tmp_path / "m" / "config.pbtxt").read_text() == "new"


def killed(repository: Path, body: str) -> None:
    """Run ``body`` in a process that kills itself."""
    script = f"""
        import os, signal
        from pathlib import Path
        from conch.convert.publish import publish, workspace
        repository = Path({str(repository)!r})
        with workspace(repository) as work:
            {body}
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=os.environ, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_leftovers_of_a_killed_conversion_are_hidden_and_removed_by_the_next(tmp_path: Path) -> None:
    killed(tmp_path, "(work / 'half').mkdir()")
    (left,) = names(tmp_path)
    assert left.startswith(".")

    with workspace(tmp_path) as work:
        assert names(tmp_path) == [work.name]
    assert names(tmp_path) == []


def test_model_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    make(tmp_path / "m", "old")
    killed(tmp_path, "(work / 'replaced').mkdir(); (repository / 'm').rename(work / 'replaced' / 'm')")
    assert "m" not in names(tmp_path)

    with workspace(tmp_path):
        assert (tmp_path / "m" / "config.pbtxt").read_text() == "old"


def test_conversion_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    with workspace(tmp_path) as first, workspace(tmp_path) as second:
        assert first.is_dir() and second.is_dir()


def test_repository_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConchError, match=r"repository .*file cannot be written to"), workspace(tmp_path / "file"):
        pass
