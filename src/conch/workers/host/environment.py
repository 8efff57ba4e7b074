"""Which interpreter a model's worker runs under: the server's own, or that of ``EXECUTION_ENV_PATH``.

The parameter names a directory or a ``conda-pack`` archive, as for Triton's Python backend.  ``Environments`` belongs
to the server and is asked on its event loop; files are read and archives unpacked in threads.
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

from conch.errors import ConchError, internal
from conch.temporary import TemporaryFolder

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
#: The oldest Python that workers run under.
_OLDEST = (3, 9)
#: How long the interpreter of an environment may take to tell its version (s).
_VERSION_SECONDS = 10.0
#: How many archives are unpacked at the same time.
_AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class PackedEnvironment:
    """One state of an archive: a file of the same path that has changed since is another."""

    path: Path
    modified: int  # ns
    size: int  # bytes


#: Unpacks an archive into a directory; gives up with an exception once the function returns True.
Unpack = Callable[[Path, Path, Callable[[], bool]], None]


class Environments:
    """Finds interpreters; each state of an archive is unpacked once, however many models ask for it.

    Unpacked environments are kept until :meth:`close`, since workers run in them.
    """

    def __init__(self, unpack: Unpack | None = None) -> None:
        self._unpack = unpack or unpack_archive
        #: Unpacking takes minutes, for which other work must not wait that is done in the event loop's own threads.
        self._unpacking = ThreadPoolExecutor(_AT_A_TIME, "conch-unpack")
        self._homes: dict[PackedEnvironment, asyncio.Task[TemporaryFolder]] = {}
        self._closed = False

    async def python(self, execution_env_path: str, model_directory: Path) -> str:
        """The path of the interpreter.  Raises INTERNAL if the environment is missing, has none, or has an old one."""
        if not execution_env_path:
            return sys.executable
        path = Path(execution_env_path.replace(_MODEL_DIRECTORY, str(model_directory)))
        archive = await asyncio.to_thread(_archive_at, path)
        home = path if archive is None else await self._home_of(archive)
        return await asyncio.to_thread(_interpreter_in, home)

    async def close(self) -> None:
        """Give up what is being unpacked, and remove what has been: no worker is left that runs in it."""
        self._closed = True
        for home in await asyncio.gather(*self._homes.values(), return_exceptions=True):
            if isinstance(home, TemporaryFolder):
                await asyncio.to_thread(home.close)
        self._homes.clear()
        self._unpacking.shutdown()

    async def _home_of(self, archive: PackedEnvironment) -> Path:
        task = self._homes.get(archive)
        if task is None:
            task = self._homes[archive] = asyncio.get_running_loop().create_task(self._unpacked(archive))
        # A load that is given up leaves the archive to the others that wait for it.
        return (await asyncio.shield(task)).path

    async def _unpacked(self, archive: PackedEnvironment) -> TemporaryFolder:
        home = TemporaryFolder("env")
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._unpacking, self._unpack, archive.path, home.path, lambda: self._closed
            )
        except BaseException as error:
            self._homes.pop(archive, None)  # the next load tries again; after close() there is nothing left to forget
            await asyncio.to_thread(home.close)
            if isinstance(error, ConchError | asyncio.CancelledError):
                raise
            raise internal(f"failed to unpack the execution environment {archive.path}: {error}") from error
        return home


def activated(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """The variables of a worker under the ``python`` of an environment of its own, as that's ``activate`` sets them.

    Scripts of packages (``etc/conda/activate.d``) are not run.  Reads the folder.
    """
    home = Path(python).parent.parent
    left = ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
    variables = {name: value for name, value in environment.items() if name not in left}
    variables["PATH"] = f"{home / 'bin'}{os.pathsep}{environment.get('PATH', os.defpath)}"
    variables["VIRTUAL_ENV" if (home / "pyvenv.cfg").exists() else "CONDA_PREFIX"] = str(home)
    return variables


def unpack_archive(archive: Path, home: Path, given_up: Callable[[], bool]) -> None:
    """Unpack ``archive`` into ``home``; raises for a member that would lie outside, or when ``given_up`` says so."""
    if not hasattr(tarfile, "data_filter"):
        raise internal(f"cannot unpack {archive} safely: this takes Python 3.11.4 or newer, this is {sys.version}")
    with tarfile.open(archive) as packed:
        packed.extractall(home, filter=partial(_checked, given_up))


def _checked(given_up: Callable[[], bool], member: tarfile.TarInfo, home: str) -> tarfile.TarInfo:
    if given_up():
        raise internal("the server is stopping")
    return tarfile.data_filter(member, home)


def _archive_at(path: Path) -> PackedEnvironment | None:
    """The archive at ``path`` as it is now; None for a directory."""
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
    """Raise INTERNAL if the interpreter is too old for workers; one that does not run fails when its worker starts."""
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
