"""Copies: complete or not there, kept while they are used, removed afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from conch.core.errors import ConchError
from conch.repository.stores.copies import Copy, ModelCopies, tidy
from conch.repository.stores.store import RemoteFile

FILE = RemoteFile("1/model.py", 3, "one")


def copies_in(folder: Path) -> ModelCopies:
    return ModelCopies(folder / "m", threading.Event())


def fill(content: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "1" / "model.py").write_bytes(content)

    return write


def make(copies: ModelCopies, file: RemoteFile = FILE, content: bytes = b"one") -> Copy:
    with copies.locked():
        copy = copies.make([file], ["1"], fill(content))
        copies.prefer(copy)
    return copy


def gone(path: Path, attempt: Callable[[], None] = lambda: None) -> bool:
    """Whether a copy without references is removed, by a thread or by an ``attempt``."""
    gc.collect()
    deadline = monotonic() + 60
    while path.exists() and monotonic() < deadline:
        attempt()
        sleep(0.01)
    return not path.exists()


def test_copy_is_found_again(tmp_path: Path) -> None:
    made = make(copies_in(tmp_path))
    assert made.directory == tmp_path / "m" / "1" / "m"
    copies = copies_in(tmp_path)
    with copies.locked():
        [found] = copies.usable()
    assert found.directory == made.directory
    assert found.has_just([FILE], ["1"])
    assert not found.has_just([FILE], ["1", "2"])
    assert not found.has_just([RemoteFile("1/model.py", 3, "two")], ["1"])
    assert not found.has_just([FILE, RemoteFile("2/model.py", 3, "one")], ["1"])
    assert not found.has_just([], ["1"])


@pytest.mark.parametrize("damage", ["shorter", "newer", "removed"])
def test_copy_that_somebody_changed_is_not_used(tmp_path: Path, damage: str) -> None:
    made = make(copies_in(tmp_path))
    path = made.directory / "1" / "model.py"
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"on" if damage == "shorter" else b"two")
    assert not made.has_just([FILE], ["1"])


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    copies = copies_in(tmp_path)

    def fail(directory: Path) -> None:
        (directory / "1" / "half").write_bytes(b"x")
        raise ConnectionResetError

    with copies.locked(), pytest.raises(ConnectionResetError):
        copies.make([FILE], ["1"], fail)
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["lock"]


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b'{"files": 1}'])
def test_copy_without_a_whole_record_is_not_used_and_goes(tmp_path: Path, record: bytes) -> None:
    home = tmp_path / "m" / "7"
    (home / "m").mkdir(parents=True)
    (home / "copy.json").write_bytes(record)
    copies = copies_in(tmp_path)
    with copies.locked():
        assert not list(copies.usable())
    assert make(copies).directory == tmp_path / "m" / "8" / "m"
    assert not home.exists()


def test_copy_that_is_replaced_stays_as_long_as_it_is_used(tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    old = make(copies)
    new = make(copies, RemoteFile("1/model.py", 3, "two"), b"two")
    directory = old.directory
    assert (directory / "1" / "model.py").read_bytes() == b"one"
    del old
    assert gone(directory.parent)
    assert new.directory.exists()


def test_newest_copy_stays_for_the_next_start(tmp_path: Path) -> None:
    directory = make(copies_in(tmp_path)).directory
    gc.collect()
    copies = copies_in(tmp_path)
    with copies.locked():
        assert [copy.directory for copy in copies.usable()] == [directory]


def test_one_makes_a_copy_while_others_wait(tmp_path: Path) -> None:
    first, second, inside = copies_in(tmp_path), copies_in(tmp_path), threading.Event()

    def wait() -> None:
        with second.locked():
            inside.set()

    with first.locked():
        thread = threading.Thread(target=wait)
        thread.start()
        assert not inside.wait(0.3)
    assert inside.wait(60)
    thread.join()


def test_server_that_stops_waits_for_no_other(tmp_path: Path) -> None:
    closed = threading.Event()
    with copies_in(tmp_path).locked():
        closed.set()
        with pytest.raises(ConchError, match="stopping"), ModelCopies(tmp_path / "m", closed).locked():
            pass


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    used = make(copies_in(tmp_path))
    (tmp_path / "m" / "new" / "m").mkdir(parents=True)
    tidy(tmp_path / "m", gone=False)
    assert not (tmp_path / "m" / "new").exists()
    tidy(tmp_path / "m", gone=True)
    assert used.directory.exists()
    home = used.directory.parent
    del used
    assert gone(home, lambda: tidy(tmp_path / "m", gone=True))
    tidy(tmp_path / "absent", gone=True)
