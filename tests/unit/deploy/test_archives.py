"""Archives: the same files give the same bytes, and come out as they went in."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.deploy.archives import copy, write_tar_gz, write_zip
from conch.deploy.requirements import Contents, Entry, contents


def repository(folder: Path) -> Path:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "2").mkdir()
    (folder / "m" / "1" / "weights.bin").write_bytes(bytes(range(256)) * 20_000)
    (folder / "m" / "1" / "tool").write_text("#!/bin/sh\n")
    (folder / "m" / "1" / "tool").chmod(0o700)
    (folder / "m" / ("long" * 50)).write_text("a name that plain tar has no room for")
    return folder


def pack(kind: str, folder: Path, target: Path) -> bytes:
    found = contents(folder)
    if kind == "zip":
        write_zip(target, found, "below")
    else:
        write_tar_gz(target, found)
    return target.read_bytes()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_the_same_files_give_the_same_bytes(kind: str, tmp_path: Path) -> None:
    first = pack(kind, repository(tmp_path / "a"), tmp_path / "first")
    other = repository(tmp_path / "b")
    for path in other.rglob("*"):
        os.utime(path, (1e9, 1e9))
    (other / "m" / "1" / "weights.bin").chmod(0o600)
    assert pack(kind, other, tmp_path / "second.other.name") == first


def test_a_zip_archive_has_everything_below_a_folder(tmp_path: Path) -> None:
    folder = repository(tmp_path / "a")
    pack("zip", folder, tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "out")
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    check(folder, tmp_path / "out" / "below")
    assert oct(modes["below/m/1/tool"]) == "0o100755"
    assert oct(modes["below/m/1/weights.bin"]) == "0o100644"
    assert oct(modes["below/m/2/"]) == "0o40755"


def test_a_tar_archive_has_everything_at_its_root(tmp_path: Path) -> None:
    folder = repository(tmp_path / "a")
    pack("tar.gz", folder, tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert {(one.uid, one.gid, one.uname, one.mtime) for one in archive} == {(0, 0, "", 0)}
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xzf", tmp_path / "a.tar.gz", "-C", tmp_path / "out"], check=True)
    check(folder, tmp_path / "out")
    assert os.access(tmp_path / "out" / "m" / "1" / "tool", os.X_OK)


def test_a_copy_has_a_file_in_every_folder(tmp_path: Path) -> None:
    """A store keeps no folders that are empty."""
    folder = repository(tmp_path / "a")
    copy(tmp_path / "out", contents(folder))
    assert (tmp_path / "out" / "m" / "2" / ".keep").is_file()
    (tmp_path / "out" / "m" / "2" / ".keep").unlink()
    check(folder, tmp_path / "out")


def check(folder: Path, unpacked: Path) -> None:
    """All of ``folder`` is there, and nothing else."""
    expected = {path.relative_to(folder): path for path in folder.rglob("*")}
    assert {path.relative_to(unpacked) for path in unpacked.rglob("*")} == set(expected)
    for name, path in expected.items():
        assert path.is_dir() or (unpacked / name).read_bytes() == path.read_bytes()


def test_a_file_that_is_gone_in_between_is_reported(tmp_path: Path) -> None:
    found = Contents((Entry("weights", tmp_path / "weights", 4),))
    with pytest.raises(ConchError, match="weights cannot be read: No such file or directory"):
        copy(tmp_path / "out", found)


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
@pytest.mark.parametrize("size", [3, 5])
def test_a_file_that_changes_in_between_is_reported(kind: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"four")
    found = Contents((Entry("weights", tmp_path / "weights", size),))
    with pytest.raises(ConchError, match="weights changed while it was packed: try again"):
        if kind == "zip":
            write_zip(tmp_path / "out", found, "below")
        else:
            write_tar_gz(tmp_path / "out", found)
