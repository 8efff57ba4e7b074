"""The interpreter of a model's ``EXECUTION_ENV_PATH``, and archives that are unpacked concurrently."""

import asyncio
import os
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from conch.core.errors import ConchError
from conch.workers.host.environment import Environments, Unpack, activated, unpack_archive
from tests.unit.fake_clock import settle

#: Python 3.11.3 and older, which Debian 12 has, know no filters for archives.
unpacks = pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python cannot unpack safely")


def make_environment(home: Path) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "activate").touch()
    (home / "bin" / "python").symlink_to(sys.executable)
    return home


def pack(archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("activate", "python"):
            entry = tarfile.TarInfo(f"bin/{name}")
            packed.addfile(entry)
    return archive


class HeldUnpacker:
    """Unpacks an environment in its thread as soon as the test lets it, or fails then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun = threading.Event()
        self.let = threading.Event()
        self.homes: list[Path] = []
        self.error = error

    def __call__(self, archive: Path, home: Path, given_up: Callable[[], bool]) -> None:
        self.homes.append(home)
        self.begun.set()
        while not self.let.wait(0.001):
            if given_up():
                raise OSError("given up")
        if self.error is not None:
            raise self.error
        make_environment(home)


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return str(pack(tmp_path / "env.tar.gz"))


async def begun(unpacker: HeldUnpacker) -> None:
    """Turns of the event loop, which the unpacking must not hold up, until it has begun."""
    while not unpacker.begun.is_set():
        await asyncio.sleep(0)


async def test_without_the_parameter_it_is_the_servers_own(tmp_path: Path) -> None:
    assert await Environments().python("", tmp_path) == sys.executable


@pytest.mark.parametrize("version", ["2.7", "3.8"])
async def test_an_environment_with_an_old_python_is_refused(tmp_path: Path, version: str) -> None:
    python = make_environment(tmp_path / "env") / "bin" / "python"
    python.unlink()
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    with pytest.raises(ConchError, match=rf"env has Python {version}; models need Python 3\.9 or newer$"):
        await Environments().python(str(tmp_path / "env"), tmp_path)


async def test_directory_may_be_named_relative_to_the_model(tmp_path: Path) -> None:
    make_environment(tmp_path / "model" / "env")
    python = await Environments().python("$$TRITON_MODEL_DIRECTORY/env", tmp_path / "model")
    assert python == str(tmp_path / "model/env/bin/python")


@unpacks
async def test_archive_is_unpacked_once_for_each_state_of_the_file(archive: str, tmp_path: Path) -> None:
    environments = Environments()
    first = await environments.python(archive, tmp_path)
    assert Path(first).exists()
    assert await environments.python(archive, tmp_path) == first
    os.utime(archive, (1, 1))
    assert await environments.python(archive, tmp_path) != first


async def test_event_loop_turns_while_an_archive_is_unpacked(archive: str, tmp_path: Path) -> None:
    environments = Environments(unpacker := HeldUnpacker())
    loading = asyncio.create_task(environments.python(archive, tmp_path))
    await begun(unpacker)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not loading.done()
    unpacker.let.set()  # by the loop itself, which would wait for ever if it unpacked
    assert Path(await loading).parent.parent == unpacker.homes[0]


async def test_loads_that_need_the_same_archive_share_one_unpacking(archive: str, tmp_path: Path) -> None:
    environments = Environments(unpacker := HeldUnpacker())
    loads = [asyncio.create_task(environments.python(archive, tmp_path)) for _ in range(3)]
    await begun(unpacker)
    unpacker.let.set()
    assert len({await load for load in loads}) == 1
    assert len(unpacker.homes) == 1


async def test_load_that_is_cancelled_leaves_the_archive_to_the_other(archive: str, tmp_path: Path) -> None:
    environments = Environments(unpacker := HeldUnpacker())
    gone, stays = [asyncio.create_task(environments.python(archive, tmp_path)) for _ in range(2)]
    await begun(unpacker)
    gone.cancel()
    unpacker.let.set()
    assert Path(await stays).exists()
    assert gone.cancelled()


async def test_unpacking_that_fails_leaves_nothing_and_is_tried_again(archive: str, tmp_path: Path) -> None:
    environments = Environments(unpacker := HeldUnpacker(OSError("no space left")))
    unpacker.let.set()
    with pytest.raises(ConchError, match=r"failed to unpack the execution environment .*: no space left"):
        await environments.python(archive, tmp_path)
    assert not unpacker.homes[0].exists()
    unpacker.error = None
    assert Path(await environments.python(archive, tmp_path)).exists()


@unpacks
async def test_close_cancels_what_is_being_unpacked_and_removes_what_was(archive: str, tmp_path: Path) -> None:
    unpackers: list[Unpack] = [unpack_archive, unpacker := HeldUnpacker()]
    environments = Environments(lambda *arguments: unpackers.pop(0)(*arguments))
    home = Path(await environments.python(archive, tmp_path)).parent.parent
    os.utime(archive, (1, 1))
    loading = asyncio.create_task(environments.python(archive, tmp_path))
    await begun(unpacker)
    await environments.close()
    with pytest.raises(ConchError, match="given up"):
        await loading
    assert not home.exists() and not unpacker.homes[0].exists()


async def test_unpacking_that_begins_during_close_fails_with_its_own_error(
    archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = tmp_path / "homes"
    homes.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(homes))
    late = str(pack(tmp_path / "late.tar.gz"))
    unpackers = {name: HeldUnpacker(OSError("given up")) for name in (Path(archive).name, "late.tar.gz")}

    def unpack(path: Path, home: Path, given_up: Callable[[], bool]) -> None:
        unpackers[path.name](path, home, lambda: False)

    environments = Environments(unpack)
    first = asyncio.create_task(environments.python(archive, tmp_path))
    await begun(unpackers[Path(archive).name])
    closing = asyncio.create_task(environments.close())
    await asyncio.sleep(0)
    second = asyncio.create_task(environments.python(late, tmp_path))
    while len(list(homes.iterdir())) < 2:
        await asyncio.sleep(0)
    unpackers[Path(archive).name].let.set()
    await asyncio.wait([first])
    await settle()
    unpackers["late.tar.gz"].let.set()
    await closing
    for load in (first, second):
        with pytest.raises(ConchError, match=r"failed to unpack the execution environment .*: given up"):
            await load


async def test_directory_without_an_activate_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match="should contain an 'activate' script"):
        await Environments().python(str(tmp_path), tmp_path)


async def test_python_that_cannot_unpack_safely_does_not(
    archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with pytest.raises(
        ConchError, match=r"cannot unpack .*env\.tar\.gz safely: this requires Python 3\.11\.4 or newer"
    ):
        await Environments().python(archive, tmp_path)


@unpacks
async def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env.tar.gz").write_text("no archive")
    with pytest.raises(ConchError, match="failed to unpack"):
        await Environments().python(str(tmp_path / "env.tar.gz"), tmp_path)
    with pytest.raises(ConchError, match=r"^Failed to get the canonical path for .*absent"):
        await Environments().python(str(tmp_path / "absent.tar.gz"), tmp_path)


@unpacks
@pytest.mark.parametrize("name", ["../../outside", "/outside"])
async def test_archive_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.addfile(tarfile.TarInfo(name))
    with pytest.raises(ConchError, match=r"failed to unpack|should contain an 'activate' script"):
        await Environments().python(str(archive), tmp_path)
    assert not (tmp_path / "outside").exists() and not Path("/outside").exists()


@unpacks
async def test_archive_with_a_link_to_the_outside_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        link = tarfile.TarInfo("bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(link)
    with pytest.raises(ConchError, match="failed to unpack"):
        await Environments().python(str(archive), tmp_path)


async def test_other_threads_continue_however_many_archives_are_unpacked(tmp_path: Path) -> None:
    environments = Environments(unpacker := HeldUnpacker())
    archives = [str(pack(tmp_path / f"{number}.tar.gz")) for number in range(64)]
    loads = [asyncio.ensure_future(environments.python(archive, tmp_path)) for archive in archives]
    await begun(unpacker)
    assert await asyncio.to_thread(lambda: "done") == "done"
    unpacker.let.set()
    await asyncio.gather(*loads)
    await environments.close()


@pytest.mark.parametrize(("file", "variable"), [("pyvenv.cfg", "VIRTUAL_ENV"), ("conda-meta", "CONDA_PREFIX")])
def test_worker_in_an_environment_finds_its_programs_first(tmp_path: Path, file: str, variable: str) -> None:
    home = make_environment(tmp_path / "env")
    (home / file).touch()
    before = {"PATH": "/usr/bin", "VIRTUAL_ENV": "/the/servers", "PYTHONHOME": "/other", "HOME": "/home"}
    assert activated(before, str(home / "bin" / "python")) == {
        "PATH": f"{home}/bin:/usr/bin",
        "HOME": "/home",
        variable: str(home),
    }
