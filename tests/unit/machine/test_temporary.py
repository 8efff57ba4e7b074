"""Temporary folders, and what becomes of those that killed processes have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conch.machine.temporary import TemporaryFolder, remove_orphans

KEPT = """
import sys, tempfile
from conch.machine.temporary import TemporaryFolder
tempfile.tempdir = sys.argv[1]
folder = TemporaryFolder("model")
(folder.path / "weights").write_bytes(b"w")
print(folder.path.parent, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.fixture
def other(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder that it has made."""
    command = [sys.executable, "-c", KEPT, str(temporary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_a_folder_is_there_as_long_as_its_context(temporary: Path) -> None:
    with TemporaryFolder() as path:
        (path / "file").touch()
        assert remove_orphans() == []
        assert (path / "file").exists()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_forgotten_is_removed(temporary: Path) -> None:
    folder = TemporaryFolder("env")
    assert folder.path.exists()
    del folder
    assert list(temporary.iterdir()) == []


def test_a_folder_of_a_process_that_was_killed_is_removed(other: tuple[subprocess.Popen[str], Path]) -> None:
    process, home = other
    assert remove_orphans() == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (home / "content" / "weights").exists()
    assert remove_orphans() == [home]
    assert not home.exists()


def test_a_process_that_is_forked_leaves_the_folder_to_its_parent(temporary: Path) -> None:
    with TemporaryFolder() as path:
        code = f"import tempfile; tempfile.tempdir = {str(temporary)!r}\n" + (
            "import os, sys; from conch.machine.temporary import TemporaryFolder\n"
            "folder = TemporaryFolder()\n"
            "if os.fork():\n    os.wait(); assert folder.path.exists()\nelse:\n    sys.exit(0)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        assert path.exists()
    assert list(temporary.iterdir()) == []


def test_what_only_looks_like_such_a_folder_is_left_alone(temporary: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "content").mkdir(parents=True)
    (victim / "lock").touch()
    (temporary / "conch-link").symlink_to(victim)
    (temporary / "conch-model-without-lock" / "content").mkdir(parents=True)
    (temporary / "conch-model-lock-elsewhere" / "content").mkdir(parents=True)
    (temporary / "conch-model-lock-elsewhere" / "lock").symlink_to(victim / "lock")
    (temporary / "conch-model-fifo").mkdir()
    os.mkfifo(temporary / "conch-model-fifo" / "lock")
    (temporary / "conch-file").touch()
    before = sorted(temporary.rglob("*"))
    assert remove_orphans() == []
    assert sorted(temporary.rglob("*")) == before


def test_links_in_an_orphan_are_not_followed(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    home = temporary / "conch-model-orphan"
    (home / "content").mkdir(parents=True)
    (home / "lock").touch()
    (home / "content" / "link").symlink_to(tmp_path / "victim")
    assert remove_orphans() == [home]
    assert not home.exists()
    assert (tmp_path / "victim" / "file").exists()
