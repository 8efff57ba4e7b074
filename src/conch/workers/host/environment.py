"""Finds the interpreter of a model's worker: the server's own, or that of ``EXECUTION_ENV_PATH``.

The parameter names a directory or a ``conda-pack`` archive, as in Triton's Python backend. ``Environments`` is owned by
the server and used on its event loop; files are read and archives unpacked in threads.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conch.core.errors import ConchError, internal
from conch.machine.temporary import TemporaryFolder

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
#: The oldest Python version that workers support.
_OLDEST = (3, 9)
#: Timeout for the query of an interpreter's version (s).
_VERSION_SECONDS = 10.0
#: Number of archives that are unpacked at the same time.
_AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class PackedEnvironment:
    """An archive as it was at one time; a later file at the same path is a different environment."""

    path: Path
    modified: int  # ns
    size: int  # bytes


#: Unpacks an archive into a directory; raises an exception as soon as the function returns True.
Unpack = Callable[[Path, Path, Callable[[], bool]], None]


class Environments:
    """Finds interpreters; each :class:`PackedEnvironment` is unpacked once for all models.

    Unpacked environments are kept until :meth:`close`, because workers run in them.
    """

    def __init__(self, unpack: Unpack | None = None) -> None:
        self._unpack = unpack or unpack_archive
        #: Its own threads, because unpacking takes minutes and would block other work in the event loop's threads.
        self._unpacking = ThreadPoolExecutor(_AT_A_TIME, "conch-unpack")
        self._homes: dict[PackedEnvironment, asyncio.Task[TemporaryFolder]] = {}
        self._closed = False

    async def python(self, execution_env_path: str, model_directory: Path) -> str:
        """Return the path of the interpreter. Raises INTERNAL if the environment or interpreter is missing or old."""
        if not execution_env_path:
            return sys.executable
        path = Path(execution_env_path.replace(_MODEL_DIRECTORY, str(model_directory)))
        archive = await asyncio.to_thread(_archive_at, path)
        home = path if archive is None else await self._home_of(archive)
        return await asyncio.to_thread(_interpreter_in, home)

    async def close(self) -> None:
        """Cancel unpacking and remove all unpacked environments; called after the workers have ended."""
        self._closed = True
        for home in await asyncio.gather(*self._homes.values(), return_exceptions=True):
            if isinstance(home, TemporaryFolder):
                await asyncio.to_thread(home.close)
        self._homes.clear()
        await asyncio.to_thread(self._unpacking.shutdown)

    async def _home_of(self, archive: PackedEnvironment) -> Path:
        task = self._homes.get(archive)
        if task is None:
            task = self._homes[archive] = asyncio.get_running_loop().create_task(self._unpacked(archive))
        # A cancelled load does not cancel unpacking for other loads that wait for it.
        return (await asyncio.shield(task)).path

    async def _unpacked(self, archive: PackedEnvironment) -> TemporaryFolder:
        home = TemporaryFolder("env")
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._unpacking, self._unpack, archive.path, home.path, lambda: self._closed
            )
        except BaseException as error:
            self._homes.pop(archive, None)  # the next load tries again; close() may have removed it
            await asyncio.to_thread(home.close)
            if isinstance(error, ConchError | asyncio.CancelledError):
                raise
            raise internal(f"failed to unpack the execution environment {archive.path}: {error}") from error
        return home


def activated(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the variables of a worker whose environment has the interpreter ``python``, as its ``activate`` sets them.

    Scripts of packages (``etc/conda/activate.d``) are not run. Reads the folder.
    """
    home = Path(python).parent.parent
    left = ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
    variables = {name: value for name, value in environment.items() if name not in left}
    variables["PATH"] = f"{home / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}"
    variables["VIRTUAL_ENV" if (home / "pyvenv.cfg").exists() else "CONDA_PREFIX"] = str(home)
    return variables


def unpack_archive(archive: Path, home: Path, given_up: Callable[[], bool]) -> None:
    """Unpack ``archive`` into ``home``; raises if a member would lie outside, or if ``given_up`` returns True."""
    if not hasattr(tarfile, "data_filter"):
        raise internal(
            f"cannot unpack {archive} safely: this requires Python 3.11.4 or newer; the server runs {sys.version}"
        )
    with tarfile.open(archive) as packed:
        packed.extractall(home, filter=partial(_checked, given_up))


def _checked(given_up: Callable[[], bool], entry: tarfile.TarInfo, home: str) -> tarfile.TarInfo:
    if given_up():
        raise internal("the server is stopping")
    return tarfile.data_filter(entry, home)


def _archive_at(path: Path) -> PackedEnvironment | None:
    """Return the archive at ``path`` in its current state; None for a directory."""
    if path.is_dir():
        return None
    try:
        status = path.stat()
        return PackedEnvironment(path.resolve(), status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        raise internal(f"Failed to get the canonical path for {path}.") from None
    except OSError as error:
        raise internal(f"failed to read the execution environment {path}: {error.strerror}") from error


def _interpreter_in(home: Path) -> str:
    activate, python = home / "bin" / "activate", home / "bin" / "python"
    if not activate.exists() or not python.exists():
        raise internal(f"Path {activate} does not exist. The Python environment should contain an 'activate' script.")
    _check_version(home, python)
    return str(python)


def _check_version(home: Path, python: Path) -> None:
    """Raise INTERNAL if the interpreter is too old; an interpreter that does not run fails when its worker starts."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        ended = subprocess.run(
            [python, "-ES", "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=_VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    version = ended.stdout.decode(errors="replace").strip()
    if re.fullmatch(r"\d+\.\d+", version) and tuple(map(int, version.split("."))) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise internal(f"the execution environment {home} has Python {version}; models need Python {oldest} or newer")
