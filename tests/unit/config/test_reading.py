"""Files of repositories are read only where that ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.config.reading import open_regular, read_json, read_small, shown_name
from tests.open_files import times_open


@pytest.fixture(params=["pipe", "device", "socket"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    match request.param:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            import socket

            socket.socket(socket.AF_UNIX).bind(str(path))
    return path


def test_what_never_ends_is_not_read(endless: Path) -> None:
    with pytest.raises(OSError, match=r"it is not a regular file|No such device or address"):
        read_small(endless)
    with pytest.raises(OSError):
        open_regular(endless)


def test_directory_and_loop_of_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "loop", "Too many levels of symbolic links")):
        with pytest.raises(OSError, match=reason):
            read_small(path)


def test_large_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="it has 1,099,511,627,776 bytes; at most 16,777,216 are allowed"):
        read_small(path)


def test_nothing_is_left_open_by_a_refusal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for _ in range(10):
        with pytest.raises(OSError):
            open_regular(tmp_path / "pipe")
    assert times_open(tmp_path / "pipe") == 0


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "\xff", "9" * 10_000])
def test_what_is_no_json_raises_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text, "latin-1")
    with pytest.raises(ValueError):
        read_json(tmp_path / "file")


def test_names_are_shown_without_what_no_eye_sees() -> None:
    assert shown_name("a\udcff\x1b\u202eb é\n") == r"a\xff\x1b\u202eb é\x0a"
