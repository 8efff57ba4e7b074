"""The output folder is whole, or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.core.errors import Code, ConchError
from conch.deploy.bundle import check_output, staged


def test_a_folder_appears_at_the_end(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as folder:
        (folder / "file").touch()
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    check_output(tmp_path / "out", tmp_path / "models")
    with staged(tmp_path / "out") as folder:
        (folder / "file").touch()
    assert (tmp_path / "out" / "file").exists()


def test_a_folder_that_is_there_stays_the_same_folder(tmp_path: Path) -> None:
    """Whose current folder it is sees the files; a link leads to them."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    before = (tmp_path / "real").stat().st_ino
    check_output(tmp_path / "link", tmp_path / "models")
    with staged(tmp_path / "link") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
    assert (tmp_path / "real").stat().st_ino == before
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["inner"]
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_without_room_is_reported_before_anything_is_written(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "out").mkdir()
    with pytest.raises(ConchError, match=r"out cannot be written: it needs .* but the disk has .* free"):
        with staged(tmp_path / "out", 10**18):
            pytest.fail("it was begun")
    assert [path.name for path in tmp_path.rglob("*")] == (["out"] if there else [])


def test_files_copied_into_an_image_are_readable_by_everyone(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with staged(tmp_path / "out") as folder:
            (folder / "models" / "m").mkdir(parents=True)
    finally:
        os.umask(before)
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        assert path.stat().st_mode & 0o777 == 0o755


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("gone")
    with pytest.raises(ConchError, match="out is a broken link: remove it"):
        check_output(tmp_path / "out", tmp_path / "models")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_what_fails(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_in_a_folder_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError), staged(tmp_path / "out") as folder:
        (folder / "file").touch()
        raise ValueError
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_got_files_in_between_is_left_alone(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "out").mkdir()
    with pytest.raises(ConchError, match="cannot be written: Directory not empty"), staged(tmp_path / "out"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "other").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "other"]


def test_output_that_is_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full" / "x").mkdir(parents=True)
    for name, what in (("file", "exists and is not a folder"), ("full", "exists and is not empty")):
        with pytest.raises(ConchError, match=f"{name} {what}: choose another folder") as caught:
            check_output(tmp_path / name, tmp_path / "models")
        assert caught.value.code is Code.ALREADY_EXISTS


def test_output_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=f"no such folder {tmp_path}/a"):
        check_output(tmp_path / "a" / "b", tmp_path / "models")
    for inside in (tmp_path / "models", tmp_path / "models" / "out"):
        with pytest.raises(ConchError, match="is in the model repository"):
            check_output(inside, tmp_path / "models")
