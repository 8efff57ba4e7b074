"""What of a repository is packed, and which links and names keep it from being packed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.deploy.requirements import contents


@pytest.fixture
def root(tmp_path: Path) -> Path:
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("pass")
    return tmp_path / "models"


def names(root: Path) -> list[str]:
    return [entry.name for entry in contents(root).entries]


def test_files_are_sorted_with_their_sizes(root: Path) -> None:
    (root / "m" / "config.pbtxt").write_text("x" * 7)
    found = contents(root)
    assert [(entry.name, entry.size) for entry in found.entries] == [("m/1/model.py", 4), ("m/config.pbtxt", 7)]
    assert found.size == 11


def test_a_folder_without_files_is_kept(root: Path) -> None:
    """As an ensemble's version is, which says that the ensemble has it."""
    (root / "ensemble" / "1").mkdir(parents=True)
    (root / "ensemble" / "1" / ".gitkeep").touch()
    assert names(root) == ["ensemble/1", "m/1/model.py"]


def test_what_belongs_to_no_model_is_left_out_and_told(root: Path) -> None:
    for left_out in (".git/HEAD", "m/1/__pycache__/model.pyc", "m/.DS_Store", "m/config.pbtxt~", "m/1/weights.partial"):
        (root / left_out).parent.mkdir(exist_ok=True)
        (root / left_out).touch()
    os.mkfifo(root / "m" / "pipe")
    found = contents(root)
    assert [entry.name for entry in found.entries] == ["m/1/model.py"]
    assert found.left_out == (
        ".git", "m/.DS_Store", "m/1/__pycache__", "m/1/weights.partial", "m/config.pbtxt~", "m/pipe",
    )  # fmt: skip


def test_a_link_within_the_repository_is_a_copy(root: Path) -> None:
    (root / "m" / "2").symlink_to("1")
    (root / "n").mkdir()
    (root / "n" / "model.py").symlink_to(root / "m" / "1" / "model.py")
    assert names(root) == ["m/1/model.py", "m/2/model.py", "n/model.py"]


@pytest.mark.parametrize(
    ("target", "where"),
    [
        ("/etc/hostname", "is a link to /etc/hostname, outside of the repository: replace it with a copy"),
        ("../../..", "outside of the repository"),
        ("..", "which contains it: remove it"),
        ("nowhere", "is a broken link"),
        ("link", "is a broken link"),
    ],
)
def test_a_link_that_cannot_be_packed_is_refused(root: Path, target: str, where: str) -> None:
    (root / "m" / "link").symlink_to(target)
    with pytest.raises(ConchError, match=f"{root}/m/link .*{where}"):
        contents(root)


def test_a_name_that_no_archive_has_is_refused(root: Path) -> None:
    Path(os.fsdecode(os.fsencode(root / "m") + b"/\xff.bin")).touch()
    with pytest.raises(ConchError, match="its name is not UTF-8: rename it"):
        contents(root)


def test_a_deleted_repository_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=f"{tmp_path}/gone cannot be read: No such file"):
        contents(tmp_path / "gone")
