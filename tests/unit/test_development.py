"""``make check`` is about the files of this project, whatever else lies in a checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def looked_at(directory: Path) -> set[str]:
    """The files that ruff looks at there, relative to ``directory``."""
    command = [sys.executable, "-m", "ruff", "check", "--show-files"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    return {Path(line).relative_to(directory).as_posix() for line in done.stdout.splitlines()}


def test_what_a_user_makes_by_the_readme_is_not_checked(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("models/greeter/1/model.py", ".demo/a.py", ".venv-lowest/b.py", "try.py", "src/conch/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import os,sys\n")

    assert looked_at(tmp_path) == {"pyproject.toml", "src/conch/c.py"}


def test_every_source_that_git_tracks_is_checked() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.pyi"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    assert set(listed.stdout.splitlines()) - looked_at(ROOT) == set()
