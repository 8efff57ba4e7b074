"""Names of objects that must not become files."""

from __future__ import annotations

import pytest

from conch.repository.stores.root import usable
from conch.repository.stores.store import RemoteFile


@pytest.mark.parametrize(
    "path",
    [
        "m/../x", "../x", "m/./x", "/etc/passwd", "m//x", "m/a\\b", "m/a\nb", "m/\0", 
        "m/" + "a" * 256, "a/" * 600 + "x",
        "", "m/\ud800", "/",
    ],
)  # fmt: skip
def test_name_that_leads_elsewhere_or_is_none_is_left_out(path: str) -> None:
    good, refused = usable([RemoteFile(path, 1), RemoteFile("m/1/model.py", 1)])
    assert [file.path for file in good] == ["m/1/model.py"]
    assert len(refused) == 1
    assert len(refused[0]) < 300


def test_file_with_the_name_of_a_directory_is_left_out() -> None:
    good, refused = usable([RemoteFile("m/1", 5), RemoteFile("m/1/model.py", 1)])
    assert [file.path for file in good] == ["m/1/model.py"]
    assert "directory" in refused[0]


def test_marks_of_directories_are_no_files() -> None:
    marked = [RemoteFile("m/1", 0), RemoteFile("m/1/a", 1), RemoteFile("m/2/", 0), RemoteFile("m/.hidden", 1)]
    good, refused = usable(marked)
    assert [file.path for file in good] == ["m/.hidden", "m/1/a", "m/2/"]
    assert not refused
