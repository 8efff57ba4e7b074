"""Files that arrive, in part, wrong, after a while, or not at all."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conch.core.errors import Code, ConchError
from conch.repository.stores.copies import Transfer, in_units
from conch.repository.stores.pool import DaemonPool
from conch.repository.stores.store import RemoteFile
from tests.unit.repository.stores.fake_store import FakeStore


@pytest.fixture
def pool() -> Iterator[DaemonPool]:
    pool = DaemonPool("test", 3)
    yield pool
    pool.close()


def files_of(store: FakeStore) -> list[RemoteFile]:
    """The files of its model m, with paths below the model."""
    return [replace(file, path=file.path.removeprefix("m/")) for file in store.find("m")]


def transfer(store: FakeStore, pool: DaemonPool, folder: Path, **given: object) -> Transfer:
    return Transfer(store, pool, "m", "model 'm'", files_of(store), folder, (0.0, 0.0), **given)  # type: ignore[arg-type]


def refusal(store: FakeStore, pool: DaemonPool, folder: Path) -> ConchError:
    with pytest.raises(ConchError) as refused:
        transfer(store, pool, folder).run()
    assert "\n" not in refused.value.message
    assert not list(folder.rglob("*.part"))
    return refused.value


def test_files_arrive_with_their_times(pool: DaemonPool, tmp_path: Path) -> None:
    store = FakeStore({"m/1/a": b"a" * 10, "m/b": b"", "n/c": b"c"})
    transfer(store, pool, tmp_path).run()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        "1/a",
        "b",
    ]
    assert (tmp_path / "1" / "a").read_bytes() == b"a" * 10
    assert (tmp_path / "b").stat().st_mtime == 1_700_000_000


def test_names_that_files_have_for_a_moment_are_no_names_of_files(pool: DaemonPool, tmp_path: Path) -> None:
    content = {f"m/{name}": name.encode() for name in ("a", "a.part", ".a.part", "a.part.part")}
    transfer(FakeStore(content), pool, tmp_path).run()
    assert {f"m/{path.name}": path.read_bytes() for path in tmp_path.iterdir()} == content


def test_download_that_fails_for_a_moment_is_tried_again(pool: DaemonPool, tmp_path: Path) -> None:
    store = FakeStore({"m/a": b"aaaa"})
    store.faults = [ConnectionResetError("reset"), TimeoutError("slow")]
    transfer(store, pool, tmp_path).run()
    assert store.fetched == ["m/a"] * 3
    assert (tmp_path / "a").read_bytes() == b"aaaa"


def test_download_that_keeps_failing_is_abandoned(pool: DaemonPool, tmp_path: Path) -> None:
    store = FakeStore({"m/a": b"aaaa"})
    store.faults = [ConnectionResetError("reset by hidden-key")] * 5
    error = refusal(store, pool, tmp_path)
    assert (error.code, len(store.fetched)) == (Code.UNAVAILABLE, 3)
    assert "hidden-key" not in error.message


@pytest.mark.parametrize("fault", [PermissionError("Access Denied"), FileNotFoundError("no such key")])
def test_what_does_not_get_better_is_not_tried_again(fault: Exception, pool: DaemonPool, tmp_path: Path) -> None:
    store = FakeStore({"m/a": b"aaaa"})
    store.faults = [fault]
    assert refusal(store, pool, tmp_path).code is Code.INVALID_ARG
    assert store.fetched == ["m/a"]


@pytest.mark.parametrize(("content", "words"), [(b"aaa", "3 bytes instead of 4"), (b"bbbb", "its md5 is different")])
def test_file_that_arrives_otherwise_than_it_is_listed_is_an_error(
    content: bytes, words: str, pool: DaemonPool, tmp_path: Path
) -> None:
    store = FakeStore({"m/a": b"aaaa"})
    store.garbled = {"m/a": content}
    assert words in refusal(store, pool, tmp_path).message
    assert len(store.fetched) == 3


def test_etag_that_is_no_digest_is_not_compared(
    pool: DaemonPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore({"m/a": b"aaaa"})
    store.garbled = {"m/a": b"bbbb"}
    monkeypatch.setattr(store, "digest_holds", lambda file: False)
    transfer(store, pool, tmp_path).run()
    assert (tmp_path / "a").read_bytes() == b"bbbb"


def test_full_disk_is_reported_as_one(pool: DaemonPool, tmp_path: Path) -> None:
    store = FakeStore({"m/a": b"aaaa"})
    store.faults = [OSError(errno.ENOSPC, "No space left on device")]
    error = refusal(store, pool, tmp_path)
    assert error.code is Code.INTERNAL
    assert "No space left" in error.message
    assert str(tmp_path) in error.message


def test_one_file_that_fails_ends_the_download_of_the_others(pool: DaemonPool, tmp_path: Path) -> None:
    store = FakeStore({f"m/{number}": b"aaaa" for number in range(50)})
    store.faults = [PermissionError("Access Denied")]
    refusal(store, pool, tmp_path)
    assert len(store.fetched) < 50


def test_closing_the_pool_ends_a_download(pool: DaemonPool, tmp_path: Path) -> None:
    store = FakeStore({"m/a": b"aaaa"})
    pool.close()
    with pytest.raises(ConchError, match="stopping"):
        transfer(store, pool, tmp_path).run()


def test_progress_is_told_every_five_seconds(
    pool: DaemonPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([0.0, 1.0, 6.0, *[7.0] * 9])
    caplog.set_level(logging.INFO, "conch")
    store = FakeStore({"m/a": b"a" * 2_000_000})
    transfer(store, pool, tmp_path, clock=lambda: next(times)).run()
    assert [record.getMessage() for record in caplog.records] == [
        "downloading model 'm': 1 file, 2.0 MB",
        "downloading model 'm': 100 %, 2.0 MB of 2.0 MB",
        "downloaded model 'm': took 7.0 s, 285.7 kB/s",
    ]


def test_amounts_are_written_for_people() -> None:
    assert [in_units(count) for count in (0, 999, 1200, 3.4e9, 5e15)] == [
        "0 bytes",
        "999 bytes",
        "1.2 kB",
        "3.4 GB",
        "5000.0 TB",
    ]
    assert [in_units(count) for count in (999.7, 999_940, 999_960)] == ["1.0 kB", "999.9 kB", "1.0 MB"]
