"""Which interpreter a model's worker runs under: the server's own, or that of ``EXECUTION_ENV_PATH``.

The parameter names a directory or a ``conda-pack`` archive, as for Triton's Python backend; an
archive is unpacked once for each state of the file.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from conch.errors import internal

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_unpacked: dict[tuple[str, int], Path] = {}


def worker_python(execution_env_path: str, model_directory: Path) -> str:
    """The path of the interpreter.  Raises INTERNAL for an environment that is not there or has none."""
    if not execution_env_path:
        return sys.executable
    path = Path(execution_env_path.replace(_MODEL_DIRECTORY, str(model_directory)))
    home = path if path.is_dir() else _unpack(path)
    python = home / "bin" / "python"
    if not (home / "bin" / "activate").exists() or not python.exists():
        raise internal(
            f"Path {home / 'bin' / 'activate'} does not exist. "
            "The Python environment should contain an 'activate' script."
        )
    return str(python)


def _unpack(archive: Path) -> Path:
    try:
        key = (str(archive.resolve()), archive.stat().st_mtime_ns)
    except OSError as error:
        raise internal(f"failed to read the execution environment {archive}: {error.strerror}") from error
    if key not in _unpacked:
        home = Path(tempfile.mkdtemp(prefix="conch-env-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(home, filter="data" if hasattr(tarfile, "data_filter") else None)
        except (OSError, tarfile.TarError) as error:
            raise internal(f"failed to unpack the execution environment {archive}: {error}") from error
        _unpacked[key] = home
    return _unpacked[key]
