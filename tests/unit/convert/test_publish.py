"""Model directories appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conch.convert.publish import publish, recover, require_free, workspace
from conch.core.errors import Code, ConchError


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

    with pytest.raises(ConchError, match=r"already exists: .*--overwrite") as raised:
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
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    script = f"""
import os, signal
from pathlib import Path
from conch.convert.publish import publish, workspace
repository = Path({str(repository)!r})
with workspace(repository) as work:
{body}
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, timeout=60)
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


def contents(repository: Path) -> dict[str, str]:
    return {path.name: (path / "config.pbtxt").read_text() for path in repository.iterdir()}


def test_nothing_is_replaced_unless_everything_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a", "old")
    make(tmp_path / "b", "old")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target == tmp_path / "c":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConchError, match="c cannot be written: No space left on device"), workspace(tmp_path) as work:
        for name in ("a", "b", "c"):
            make(work / "made" / name, "new")
        publish(work / "made", work, tmp_path, ["a", "b", "c"], overwrite=True)
    assert contents(tmp_path) == {"a": "old", "b": "old"}


@pytest.mark.parametrize("moves", range(6))
def test_a_conversion_killed_while_it_publishes_has_replaced_nothing(moves: int, tmp_path: Path) -> None:
    """After each of its moves: two old models out of the way, three new ones into place."""
    make(tmp_path / "a", "old")
    make(tmp_path / "b", "old")
    killed(
        tmp_path,
        f"""
            for name in 'abc':
                (work / 'made' / name).mkdir(parents=True)
                (work / 'made' / name / 'config.pbtxt').write_text('new')
            rename, left = Path.rename, [{moves}]
            def count(path, target):
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return rename(path, target)
            Path.rename = count
            Path.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
            publish(work / 'made', work, repository, ['a', 'b', 'c'], overwrite=True)
        """,
    )
    recover(tmp_path)
    assert contents(tmp_path) == {"a": "old", "b": "old"}


def test_a_model_that_was_put_there_after_the_kill_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path / "m", "old")
    killed(
        tmp_path,
        """
            (work / 'made' / 'm').mkdir(parents=True)
            Path.unlink = lambda path: os.kill(os.getpid(), signal.SIGKILL)
            publish(work / 'made', work, repository, ['m'], overwrite=True)
        """,
    )
    shutil.rmtree(tmp_path / "m")
    make(tmp_path / "m", "by hand")

    recover(tmp_path)

    assert (tmp_path / "m" / "config.pbtxt").read_text() == "by hand"
    (replaced,) = tmp_path.glob(".*/replaced/m/config.pbtxt")
    assert replaced.read_text() == "old"


def test_conversion_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    with workspace(tmp_path) as first, workspace(tmp_path) as second:
        assert first.is_dir() and second.is_dir()


def test_repository_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConchError, match=r"repository .*file cannot be written to"), workspace(tmp_path / "file"):
        pass
