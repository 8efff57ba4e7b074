"""Which interpreter a model's ``EXECUTION_ENV_PATH`` stands for."""

import os
import sys
import tarfile
from pathlib import Path

import pytest

from conch.errors import ConchError
from conch.workers.host.environment import worker_python


def make_environment(home: Path) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "activate").touch()
    (home / "bin" / "python").symlink_to(sys.executable)
    return home


def pack(home: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("activate", "python"):
            entry = tarfile.TarInfo(f"bin/{name}")
            packed.addfile(entry)
    return archive


def test_without_the_parameter_it_is_the_servers_own(tmp_path: Path) -> None:
    assert worker_python("", tmp_path) == sys.executable


def test_directory_may_be_named_relative_to_the_model(tmp_path: Path) -> None:
    make_environment(tmp_path / "model" / "env")
    assert worker_python("$$TRITON_MODEL_DIRECTORY/env", tmp_path / "model") == str(tmp_path / "model/env/bin/python")


def test_archive_is_unpacked_once_for_each_state_of_the_file(tmp_path: Path) -> None:
    archive = pack(tmp_path, tmp_path / "env.tar.gz")
    first = worker_python(str(archive), tmp_path)
    assert Path(first).exists()
    assert worker_python(str(archive), tmp_path) == first
    os.utime(archive, (1, 1))
    assert worker_python(str(archive), tmp_path) != first


def test_directory_without_an_activate_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="should contain an 'activate' script"):
        worker_python(str(tmp_path), tmp_path)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env.tar.gz").write_text("no archive")
    with pytest.raises(ConchError, match="failed to unpack"):
        worker_python(str(tmp_path / "env.tar.gz"), tmp_path)
    with pytest.raises(ConchError, match="No such file"):
        worker_python(str(tmp_path / "absent.tar.gz"), tmp_path)


def test_archive_that_leads_outside_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.addfile(tarfile.TarInfo("../../outside"))
    with pytest.raises(ConchError, match="failed to unpack"):
        worker_python(str(archive), tmp_path)
